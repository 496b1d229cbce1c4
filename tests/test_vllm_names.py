"""What programs for vLLM call by its names: arguments, prompts, bars, caches and sleep."""

import contextlib
import io
from dataclasses import asdict

import numpy as np
import pytest

from mmvllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    LoRARequest,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.entrypoints.metrics import Counter, Gauge, Metric
from mmvllm.errors import RequestError
from mmvllm.pooling_params import PoolingParams
from mmvllm.sampling_params import RequestOutputKind
from tests.helpers.engine.async_engines import async_test
from tests.helpers.engine.requests import ask, noise_image

OPTIONS = {"device": "cpu", "num_kvcache_blocks": 64, "skip_warmup": True}
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0)


def test_engine_args_are_the_arguments_of_an_llm(checkpoint):
    args = EngineArgs(model=checkpoint, max_num_seqs=3, limit_mm_per_prompt={"image": 2}, **OPTIONS)
    with LLM(**asdict(args)) as llm:
        assert llm.engine.max_num_seqs == 3 and llm.generate("Hello", SHORT)[0].text
    assert AsyncEngineArgs is EngineArgs
    with pytest.raises(TypeError, match="EngineArgs has no argument 'max_num_seq'; did you mean 'max_num_seqs'"):
        EngineArgs(max_num_seq=3)
    with pytest.raises(ValueError, match=r"max_num_seqs must be .*, got 0"):
        EngineArgs(max_num_seqs=0)


def test_prompts_may_be_typed(make_llm, checkpoint):
    llm, image = make_llm(checkpoint), noise_image(60, 60)
    text = "<|vision_start|><|image_pad|><|vision_end|>What?"
    prompts = [TextPrompt(prompt=text, multi_modal_data={"image": image}, multi_modal_uuids={"image": ["a"]})]
    prompts.append(TokensPrompt(prompt_token_ids=[5, 6, 7], cache_salt="own"))
    first, second = llm.generate(prompts, SHORT)
    assert first.num_image_tokens > 0 and second.prompt_token_ids == [5, 6, 7]


@pytest.mark.parametrize(("use_tqdm", "is_shown"), [(True, True), (None, False), (False, False)])
def test_a_bar_is_shown_where_it_is_asked_for(make_llm, checkpoint, use_tqdm, is_shown):
    llm = make_llm(checkpoint)
    calls = [
        lambda: llm.generate("Hello", SHORT, use_tqdm=use_tqdm),
        lambda: llm.chat(ask("Hello")["messages"], SHORT, use_tqdm=use_tqdm),
        lambda: llm.embed("Hello", use_tqdm=use_tqdm),
        lambda: llm.score("Hello", ["a", "b"], use_tqdm=use_tqdm),
        lambda: [*llm.stream_multimodal(ask("Hello"), SHORT, use_tqdm=use_tqdm)],
    ]
    for one in calls:
        with contextlib.redirect_stderr(io.StringIO()) as err:  # no terminal
            one()
        assert ("1/1" in err.getvalue()) == is_shown


def test_the_engine_of_an_llm_has_the_groups_of_its_requests(make_llm, checkpoint):
    llm = make_llm(checkpoint)
    llm.add_request("Hello", priority=3)
    llm.llm_engine.step()
    (group,) = llm.llm_engine.scheduler.groups.values()
    assert group.priority == 3 and len(group.first_seq.output_token_ids) == 1
    assert group.lora_request is None and group.pooling_params is None


def test_the_engine_generates(make_llm, checkpoint):
    engine = make_llm(checkpoint).llm_engine
    prompts, params = ["Hello", [5, 6, 7], "The"], SamplingParams(max_tokens=6)
    outputs = engine.generate(prompts, params)
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    assert [output.text for output in outputs] == [
        output.text for output in make_llm(checkpoint).generate(prompts, params)
    ]
    assert engine.generate([]) == []
    with pytest.raises(RequestError, match="token ids of a prompt must be"):
        engine.generate(["Hello", [10**9]], params)
    assert engine.is_finished()
    engine.add_request("Hello")
    with pytest.raises(RuntimeError, match="1 requests are in flight"):
        engine.generate(prompts)


def test_a_group_has_the_parameters_of_its_request(make_llm, checkpoint):
    engine, pooling = make_llm(checkpoint).llm_engine, PoolingParams(pooling="mean")
    engine.add_request("Hello", pooling=pooling)
    (group,) = engine.scheduler.groups.values()
    assert group.pooling_params == pooling


def test_the_prefix_cache_is_emptied(make_llm, checkpoint):
    llm, request = make_llm(checkpoint, kvcache_block_size=4), ask(noise_image(60, 60), "What is it?")
    first, second = (llm.generate_multimodal(request, SHORT)[0] for _ in range(2))
    assert llm.reset_prefix_cache() is True
    third = llm.generate_multimodal(request, SHORT)[0]
    assert second.num_cached_tokens > 0 == third.num_cached_tokens
    assert first.token_ids == second.token_ids == third.token_ids


def test_an_llm_sleeps_and_wakes_up(checkpoint):
    request = ask(noise_image(60, 60), "What is it?")
    with LLM(checkpoint, **OPTIONS) as kept, LLM(checkpoint, **OPTIONS) as llm:
        params = [RANDOM, SHORT, RANDOM, SHORT]  # each request has the next of the engine's own random generators
        want = [kept.generate_multimodal(request, one)[0].token_ids for one in params]
        got = [llm.generate_multimodal(request, RANDOM)[0].token_ids]
        llm.add_request(llm.processor(request), SHORT, request_id="a")
        with pytest.raises(RuntimeError, match="1 requests are in flight; finish or abort them"):
            llm.sleep()
        llm.abort_request("a")
        llm.wake_up()  # it is awake
        for _ in range(2):
            llm.sleep(level=2)
        for call in (lambda: llm.generate("Hello"), llm.step, lambda: llm.embed("a"), lambda: llm.add_request("a")):
            with pytest.raises(RuntimeError, match="the engine is asleep; call wake_up first"):
                call()
        for _ in range(2):
            llm.wake_up()
        got += [llm.generate_multimodal(request, one)[0].token_ids for one in params[2:]]
        assert got == [want[0], *want[2:]]


def test_an_llm_that_could_not_wake_up_may_try_again(checkpoint, monkeypatch):
    llm = LLM(checkpoint, **OPTIONS)
    llm.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(LLMEngine, "reload", lambda self: exec('raise MemoryError("no room")'))
        with pytest.raises(MemoryError, match="no room"):
            llm.wake_up()
    llm.wake_up()
    assert llm.generate("Hello", SHORT)
    llm.sleep()
    llm.exit()
    llm.wake_up()  # it has exited
    for call in (lambda: llm.generate("Hello"), llm.sleep):
        with pytest.raises(RuntimeError, match="the engine has exited; make a new one"):
            call()


def test_the_metrics_of_an_llm_are_read(checkpoint):
    request = ask(noise_image(60, 60), "What is it?")
    with LLM(checkpoint, **OPTIONS | {"skip_warmup": False}, kvcache_block_size=4) as llm:

        def values(kind: type[Metric]) -> dict[str, float]:
            metrics = [metric for metric in llm.get_metrics() if isinstance(metric, kind)]
            assert all(metric.labels == {"model_name": llm.model, "engine": "0"} for metric in metrics)
            return {metric.name.removeprefix("vllm:"): metric.value for metric in metrics}

        assert set(values(Counter).values()) == {0}
        first, second = (llm.generate_multimodal(request, SHORT)[0] for _ in range(2))
        llm.add_request(llm.processor(request), SHORT, request_id="aborted")
        llm.step()
        assert (values(Gauge)["num_requests_running"], values(Gauge)["num_requests_waiting"]) == (1, 0)
        assert values(Gauge)["kv_cache_usage_perc"] > 0
        llm.abort_request("aborted")
        counts = {
            "prompt_tokens": first.num_prompt_tokens + second.num_prompt_tokens,
            "generation_tokens": 2 * SHORT.max_tokens + 1,
            "prefix_cache_queries": first.num_prompt_tokens + second.num_prompt_tokens,
            "prefix_cache_hits": second.num_cached_tokens,
            "mm_cache_queries": 3,
            "mm_cache_hits": 2,
            "num_preemptions": 0,
        }
        assert values(Counter) == counts and second.num_cached_tokens > 0
        llm.sleep()
        assert values(Gauge)["engine_sleep_state"] == 1 and values(Counter) == counts
        llm.wake_up()
        assert values(Gauge)["engine_sleep_state"] == 0 and values(Counter) == counts


def test_engines_are_made_from_arguments(checkpoint):
    kwargs = {"max_pixels": 28 * 28 * 4}
    args = EngineArgs(model=checkpoint, mm_processor_kwargs=kwargs, enable_sleep_mode=True, runner="pooling", **OPTIONS)
    request = ask(noise_image(120, 120), "What is it?")
    with LLM.from_engine_args(args) as llm:
        (output,) = llm.generate_multimodal(request, SHORT)
        assert output.finished and output.num_image_tokens <= 4
    with pytest.raises(TypeError, match="LLMEngine takes no mm_processor_kwargs; give them to LLM"):
        LLMEngine.from_engine_args(args)
    engine = LLMEngine.from_engine_args(EngineArgs(model=checkpoint, mm_processor_cache_gb=0, **OPTIONS))
    engine.add_request("Hello", SHORT)
    assert engine.has_unfinished_requests()
    while engine.has_unfinished_requests():
        engine.step()
    engine.exit()


@async_test
async def test_an_async_llm_is_made_from_arguments(checkpoint):
    async with AsyncLLM.from_engine_args(EngineArgs(model=checkpoint, max_num_seqs=3, **OPTIONS)) as engine:
        assert engine.max_num_seqs == 3 and (await engine.embed("Hello")).embedding is not None


def test_sampling_params_are_as_in_vllm():
    kinds = RequestOutputKind
    params = SamplingParams(max_tokens=4, extra_args={"key": 1}, output_kind=kinds.FINAL_ONLY)
    assert params.clone() == params and params.clone().extra_args == {"key": 1} and hash(params) == hash(params.clone())
    with pytest.raises(ValueError, match="does not support output_kind="):
        SamplingParams(output_kind=kinds.CUMULATIVE)
    with pytest.raises(RequestError, match=r"extra_args must be .*, got 'a'"):
        SamplingParams(extra_args="a")


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_that_are_not_decoded_have_no_text(make_llm, checkpoint, streams):
    llm = make_llm(checkpoint)
    plain, bare = (SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1, detokenize=one) for one in (True, False))
    want = llm.generate("Hello", plain)[0].outputs[0]
    if streams:
        deltas = list(llm.stream_multimodal({"prompt": "Hello"}, bare, stream=True))
        assert "".join(delta.text for delta in deltas) == ""
        assert [token_id for delta in deltas for token_id in delta.token_ids] == want.token_ids
        assert sum(len(delta.logprobs) for delta in deltas) == 6
    else:
        got = llm.generate("Hello", bare)[0].outputs[0]
        assert (got.text, got.token_ids, len(got.logprobs)) == ("", want.token_ids, 6)
    with pytest.raises(RequestError, match="stop needs the text, which detokenize=False leaves out"):
        SamplingParams(stop="a", detokenize=False)


def test_prompts_have_priorities(make_llm, checkpoint):
    llm, finished = make_llm(checkpoint, max_num_seqs=1), []
    llm.engine.on_finished = lambda group: finished.append(group.priority)
    outputs = llm.generate(["a", [5, 6], {"prompt": "b"}], SHORT, priority=[3, 1, 2])
    assert finished == [1, 2, 3] and outputs[1].prompt_token_ids == [5, 6]
    with pytest.raises(
        RequestError, match="priority must be a list with one value for each of 2 prompts, got 1 values"
    ):
        llm.generate(["a", "b"], SHORT, priority=[1])


def test_chats_take_arguments_of_processors_and_named_images(make_llm, checkpoint):
    llm, image = make_llm(checkpoint), noise_image(120, 120)
    message = {"role": "user", "content": [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "a"}]}
    whole, small = (
        llm.chat([message], SHORT, mm_processor_kwargs=kwargs)[0] for kwargs in (None, {"max_pixels": 28 * 28 * 4})
    )
    assert whole.num_image_tokens > small.num_image_tokens > 0


def test_prompts_are_encoded(make_llm, checkpoint):
    llm = make_llm(checkpoint)
    (encoded,), (embedded,) = llm.encode("Hello", pooling_task="embed"), llm.embed("Hello")
    assert np.array_equal(encoded.outputs.data, embedded.embedding)
    with pytest.raises(RequestError, match=r"pooling_task must be .*, got 'classify'"):
        llm.encode("Hello", pooling_task="classify")


def test_adapters_are_imported_as_from_vllm():
    from mmvllm.lora.request import LoRARequest as request_of_vllm

    assert request_of_vllm is LoRARequest
