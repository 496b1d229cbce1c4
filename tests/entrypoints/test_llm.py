"""LLM: order of outputs, options of a request, and what an output contains."""

import time
from functools import partial

import pytest

from mmvllm import LLM, SamplingParams
from mmvllm.engine.tokenizer import eos_token_ids_of
from mmvllm.models.folder import BUNDLED
from tests.helpers.engine.requests import ask, noise_image, ranges_of

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
GOOD = ask(noise_image(80, 60), "Describe this image.")


def test_generate_takes_strings_and_token_ids(llm):
    text, ids = "Count the shapes.", llm.tokenizer("Count the shapes.")["input_ids"]
    outputs = llm.generate([text, ids], SHORT)
    assert outputs[0].token_ids == outputs[1].token_ids and outputs[0].num_prompt_tokens == len(ids)
    assert llm.generate(text, SHORT)[0].token_ids == llm.generate(ids, SHORT)[0].token_ids == outputs[0].token_ids
    assert llm.generate([], SHORT) == []


def test_outputs_are_in_the_order_of_the_requests(llm):
    lengths = [7, 1, 5, 2, 6, 3, 4, 1, 2, 9, 3]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    requests = [ask(noise_image(60 + i, 60), "What?") if i % 2 else ask("What?") for i in range(len(lengths))]
    outputs = llm.generate_multimodal(requests, params)
    assert [len(output.token_ids) for output in outputs] == lengths


def test_an_output_has_ids_text_counts_and_times(llm):
    start = time.time()
    request = {**GOOD, "request_id": "mine", "cache_salt": "cold"}
    output = llm.generate_multimodal([request], SHORT)[0]
    assert output.request_id == "mine" and output["request_id"] == "mine"
    assert output["text"] == output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert output.finish_reason == "length" and output.error is None
    assert output.num_image_tokens == ranges_of(llm.processor(GOOD))[0][1]
    assert output.num_prompt_tokens == len(llm.processor(GOOD).token_ids) and output.num_cached_tokens == 0
    assert start <= output.arrival_time <= output.first_token_time <= output.finish_time <= time.time()
    with pytest.raises(KeyError, match="nonsense"):
        output["nonsense"]


def test_a_request_with_text_and_images(llm):
    text = llm.tokenizer.apply_chat_template(GOOD["messages"], tokenize=False, add_generation_prompt=True)
    plain = {"text": text, "images": [GOOD["messages"][0]["content"][0]["image"]]}
    first, second = llm.generate_multimodal([GOOD, plain], SHORT)
    assert first.token_ids == second.token_ids


def test_sampling_params_of_a_request_override_the_argument(llm):
    own = [SamplingParams(max_tokens=1, ignore_eos=True), {"max_tokens": 2, "ignore_eos": True}, None]
    outputs = llm.generate_multimodal([{**GOOD, "sampling_params": p} for p in own], SHORT)
    assert [len(output.token_ids) for output in outputs] == [1, 2, 4]


def test_optional_keys_may_be_none(llm):
    keys = ("request_id", "priority", "cache_salt", "sampling_params", "min_pixels", "max_pixels")
    output = llm.generate_multimodal([{**GOOD, **dict.fromkeys(keys)}], SHORT)[0]
    assert output.token_ids == llm.generate_multimodal([GOOD], SHORT)[0].token_ids


def test_stop_strings_and_stop_token_ids_end_a_completion(llm):
    free = llm.generate("Count the shapes.", SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0))[0]
    stop = free.text[len(free.text) // 2 :][:3]
    stopped = llm.generate("Count the shapes.", SamplingParams(max_tokens=12, ignore_eos=True, stop=[stop, "@@@"]))[0]
    assert stopped.finish_reason == "stop" and stopped.text == free.text[: free.text.index(stop)]
    assert stopped.outputs[0].stop_reason == stop and free.outputs[0].stop_reason is None
    at_once = llm.generate("Count the shapes.", SamplingParams(max_tokens=12, ignore_eos=True, stop=free.text[:1]))[0]
    assert (at_once.text, at_once.finish_reason) == ("", "stop")
    token_id = free.token_ids[3]
    at = free.token_ids.index(token_id)
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[token_id])
    ended = llm.generate("Count the shapes.", params)[0]
    assert ended.token_ids == free.token_ids[: at + 1] and ended.outputs[0].stop_reason == token_id
    late = SamplingParams(max_tokens=12, ignore_eos=True, stop=[stop], min_tokens=12)
    assert llm.generate("Count the shapes.", late)[0].token_ids == free.token_ids
    assert free.cumulative_logprob == pytest.approx(sum(v for row in free.logprobs for v in row.values()))


@pytest.mark.parametrize("ends", ["a stop string", "a stop token", "the end"])
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("includes", [True, False])
def test_special_tokens_and_what_stopped_it_may_be_in_the_text(llm, ends, skips, includes):
    """Streamed or not; the end of a sequence is a special token too."""
    special = {token_id: 3.0 for token_id, token in llm.tokenizer.added_tokens_decoder.items() if token.special}
    base = {"max_tokens": 40, "logit_bias": special, "seed": 3, "temperature": 1.0}
    decode = partial(llm.tokenizer.decode, skip_special_tokens=skips)
    free = llm.generate("Count the shapes.", SamplingParams(**base, ignore_eos=True))[0].token_ids
    text = decode(free)
    assert ("<|" in text) == (not skips)
    if ends == "a stop string":
        own = {"ignore_eos": True, "stop": text[len(text) // 2 :][:3]}
        want = text[: text.index(own["stop"]) + len(own["stop"]) * includes]
    else:
        eos = eos_token_ids_of(llm.engine.model_config, llm.tokenizer)
        ending = eos if ends == "the end" else {next(one for one in free[5:] if one in special)}
        own = {} if ends == "the end" else {"ignore_eos": True, "stop_token_ids": ending}
        ids = free[: next(i + 1 for i, one in enumerate(free) if one in ending)]
        want = decode(ids if includes else ids[:-1])
    params = SamplingParams(**base, **own, skip_special_tokens=skips, include_stop_str_in_output=includes)
    [output] = llm.generate("Count the shapes.", params)
    assert output.text == want
    deltas = [*llm.stream_multimodal([{"prompt": "Count the shapes."}], params, stream=True)]
    assert "".join(delta.text for delta in deltas) == want


def test_an_output_has_the_text_of_its_prompt(llm):
    assert llm.generate("Count the shapes.", SHORT)[0].prompt == "Count the shapes."
    assert llm.generate([[5, 6]], SHORT)[0].prompt is None
    prompt = llm.generate_multimodal([GOOD], SHORT)[0].prompt
    assert prompt == llm.tokenizer.apply_chat_template(GOOD["messages"], tokenize=False, add_generation_prompt=True)


def test_several_completions_per_request(llm):
    params = SamplingParams(n=3, temperature=1.5, max_tokens=6, ignore_eos=True, seed=5, logprobs=1)
    output = llm.generate_multimodal([GOOD], params)[0]
    completions = [completion.token_ids for completion in output.completions]
    assert len(completions) == 3 and len({tuple(token_ids) for token_ids in completions}) > 1
    assert [completion.index for completion in output.completions] == [0, 1, 2]
    assert output.text == output.completions[0].text
    assert [c.token_ids for c in llm.generate_multimodal([GOOD], params)[0].completions] == completions


def test_automatic_request_ids_do_not_collide_with_given_ones(llm):
    bad = {"text": ""}
    requests = [ask("x"), ask("x", request_id="0"), ask("x", request_id="auto-2"), ask("x"), bad, ask("x"), bad]
    outputs = llm.generate_multimodal(requests, SHORT, on_error="return")
    assert [output.error is None for output in outputs] == [True, True, True, True, False, True, False]
    assert len({output.request_id for output in outputs}) == len(requests)


def test_unseeded_sampling_repeats_with_the_engine_seed(checkpoint, make_llm):
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    first, again, other = (
        [o.token_ids for o in make_llm(checkpoint, **options).generate_multimodal([GOOD] * 3, params)]
        for options in ({"seed": 1}, {"seed": 1, "skip_warmup": False}, {"seed": 2})
    )
    assert first == again != other and first[0] != first[1]


def test_the_bundled_model_is_the_default():
    llm = LLM(skip_warmup=True, num_kvcache_blocks=256)
    assert llm.engine.model_config.architecture == "Qwen2VLForConditionalGeneration" and BUNDLED.is_dir()
    output = llm.generate_multimodal([ask(noise_image(150, 150), "Describe this image.")])[0]
    assert output.error is None and output.text
    llm.exit()
