"""The front door: orders, options, streams, and everything that can be wrong with a request."""

import contextlib
import gc
import itertools
import json
import shutil
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mmvllm import LLM, LLMEngine, SamplingParams
from mmvllm.errors import RequestsAborted
from mmvllm.intake import Prefetcher
from mmvllm.models.weights import BUNDLED
from tests.helpers.engines import assert_idle
from tests.helpers.requests import ask, noise_image, patches_of, spans_of

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
GOOD = ask(noise_image(80, 60), "Describe this image.")


@pytest.fixture(scope="module")
def llm(checkpoint):
    llm = LLM(checkpoint, dtype="float32", device="cpu", num_kvcache_blocks=64, max_num_seqs=4, skip_warmup=True)
    yield llm
    llm.exit()


@pytest.fixture(autouse=True)
def nothing_left(llm):
    yield
    assert_idle(llm)
    llm.engine.encoder_cache.check(set())


def test_generate_takes_strings_and_token_ids(llm):
    text, ids = "Count the shapes.", llm.tokenizer("Count the shapes.")["input_ids"]
    outputs = llm.generate([text, ids], SHORT)
    assert outputs[0].token_ids == outputs[1].token_ids and outputs[0].num_prompt_tokens == len(ids)
    assert llm.generate(text, SHORT)[0].token_ids == llm.generate(ids, SHORT)[0].token_ids == outputs[0].token_ids
    assert llm.generate([], SHORT) == []


def test_outputs_come_in_the_order_of_the_requests(llm):
    lengths = [7, 1, 5, 2, 6, 3, 4, 1, 2, 9, 3]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    requests = [ask(noise_image(60 + i, 60), "What?") if i % 2 else ask("What?") for i in range(len(lengths))]
    outputs = llm.generate_multimodal(requests, params)
    assert [len(output.token_ids) for output in outputs] == lengths


def test_an_output_says_what_happened(llm):
    start = time.time()
    request = {**GOOD, "request_id": "mine", "cache_salt": "cold"}
    output = llm.generate_multimodal([request], SHORT)[0]
    assert output.request_id == "mine" and output["request_id"] == "mine"
    assert output["text"] == output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert output.finish_reason == "length" and output.error is None
    assert output.num_image_tokens == spans_of(llm.processor(GOOD))[0][1]
    assert output.num_prompt_tokens == len(llm.processor(GOOD).token_ids) and output.num_cached_tokens == 0
    assert start <= output.arrival_time <= output.first_token_time <= output.finish_time <= time.time()
    with pytest.raises(KeyError, match="nonsense"):
        output["nonsense"]


def test_text_and_images_request(llm):
    text = llm.tokenizer.apply_chat_template(GOOD["messages"], tokenize=False, add_generation_prompt=True)
    plain = {"text": text, "images": [GOOD["messages"][0]["content"][0]["image"]]}
    first, second = llm.generate_multimodal([GOOD, plain], SHORT)
    assert first.token_ids == second.token_ids


def test_a_request_brings_its_own_parameters(llm):
    own = [SamplingParams(max_tokens=1, ignore_eos=True), {"max_tokens": 2, "ignore_eos": True}, None]
    outputs = llm.generate_multimodal([{**GOOD, "sampling_params": p} for p in own], SHORT)
    assert [len(output.token_ids) for output in outputs] == [1, 2, 4]


def test_optional_keys_may_be_none(llm):
    keys = ("request_id", "priority", "cache_salt", "sampling_params", "min_pixels", "max_pixels")
    output = llm.generate_multimodal([{**GOOD, **dict.fromkeys(keys)}], SHORT)[0]
    assert output.token_ids == llm.generate_multimodal([GOOD], SHORT)[0].token_ids


def test_a_processor_that_raises_spares_the_others(llm):
    class Picky:
        def apply_chat_template(self, messages, **options):
            return "text"

        def __call__(self, text, images, return_tensors):
            if images:
                raise RuntimeError("no pictures today")
            return {"input_ids": torch.tensor([[5, 6]])}

    outputs = llm.generate_multimodal([ask("x"), GOOD, ask("y")], SHORT, processor=Picky(), on_error="return")
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[1].error == "preparation failed: RuntimeError: no pictures today"


def test_lower_priority_values_run_first(llm):
    requests = [ask("Count.", request_id=str(i), priority=-i) for i in range(12)]
    engine, order = llm.engine, []
    for request in requests:
        prompt = llm.processor(request)
        engine.add_request(prompt, SHORT, request["request_id"], priority=request["priority"])
    while not engine.is_finished():
        order += [int(output.request_id) for output in engine.step()[0]]
    assert order[:4] == [11, 10, 9, 8]


def test_stop_strings_stop_token_ids_and_eos(llm):
    free = llm.generate("Count the shapes.", SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0))[0]
    stop = free.text[len(free.text) // 2 :][:3]
    stopped = llm.generate("Count the shapes.", SamplingParams(max_tokens=12, ignore_eos=True, stop=[stop, "@@@"]))[0]
    assert stopped.finish_reason == "stop" and stopped.text == free.text[: free.text.index(stop)]
    at_once = llm.generate("Count the shapes.", SamplingParams(max_tokens=12, ignore_eos=True, stop=free.text[:1]))[0]
    assert (at_once.text, at_once.finish_reason) == ("", "stop")
    token_id = free.token_ids[3]
    at = free.token_ids.index(token_id)
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[token_id])
    assert llm.generate("Count the shapes.", params)[0].token_ids == free.token_ids[: at + 1]
    late = SamplingParams(max_tokens=12, ignore_eos=True, stop=[stop], min_tokens=12)
    assert llm.generate("Count the shapes.", late)[0].token_ids == free.token_ids
    assert free.cumulative_logprob == pytest.approx(sum(v for row in free.logprobs for v in row.values()))


def test_several_answers(llm):
    params = SamplingParams(n=3, temperature=1.5, max_tokens=6, ignore_eos=True, seed=5, logprobs=1)
    output = llm.generate_multimodal([GOOD], params)[0]
    answers = [completion.token_ids for completion in output.completions]
    assert len(answers) == 3 and len({tuple(answer) for answer in answers}) > 1
    assert output.text == output.completions[0].text
    assert [c.token_ids for c in llm.generate_multimodal([GOOD], params)[0].completions] == answers


def test_stream_yields_as_requests_finish_from_an_endless_iterator(llm):
    taken = itertools.count()

    def endless():
        for i in taken:
            yield ask(noise_image(40 + i % 5, 50), "What?", request_id=f"r{i}")

    stream = llm.stream_multimodal(endless(), SHORT)
    outputs = list(itertools.islice(stream, 10))
    assert len({output.request_id for output in outputs}) == 10
    stream.close()
    assert next(taken) < 10 + 4 * llm.engine.config.max_num_seqs + 16, "requests must be taken a bounded number ahead"


def test_a_slow_iterator_does_not_hold_up_what_is_in_flight(llm):
    arrived = threading.Event()

    def slow():
        yield ask("First.", request_id="first")
        assert arrived.wait(20), "the first output must come while the second request does not"
        yield ask("Second.", request_id="second")

    seen = []
    for output in llm.stream_multimodal(slow(), SHORT):
        seen.append(output.request_id)
        arrived.set()
    assert seen == ["first", "second"]


def test_what_the_iterator_raises_reaches_the_caller(llm):
    def broken():
        yield GOOD
        raise ZeroDivisionError("the caller's own")

    with pytest.raises(ZeroDivisionError, match="the caller's own"):
        list(llm.stream_multimodal(broken(), SHORT))


def test_threads_take_turns(llm):
    """And so does an iterator of requests that itself asks the model, from the thread that walks it."""
    want = llm.generate_multimodal([GOOD], SHORT)[0].token_ids

    def asks_itself():
        for _ in range(4):
            assert llm.generate("Count.", SHORT)[0].error is None
            yield GOOD

    def work(_):
        return [output.token_ids for output in llm.generate_multimodal([GOOD] * 5, SHORT, use_tqdm=False)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(6))) == [[want] * 5] * 6
    assert [output.token_ids for output in llm.stream_multimodal(asks_itself(), SHORT)] == [want] * 4


def test_logits_that_are_not_numbers_end_their_request_only(llm):
    ids = [llm.engine.model_config.image_token_id] * 4 + [5]
    broken = {"pixel_values": torch.full((16, 1176), float("nan")), "image_grid_thw": [(1, 4, 4)]}
    for params in (SHORT, SamplingParams(temperature=1.0, n=3)):
        bad = llm.engine.add_request(ids, params, **broken)
        good = llm.engine.add_request("Count.", SHORT)
        outputs = {}
        while not llm.engine.is_finished():
            outputs |= {output.request_id: output for output in llm.engine.step()[0]}
        assert "not numbers" in outputs[bad].error and outputs[bad].finish_reason == "error"
        assert outputs[good].error is None and len(outputs[good].token_ids) == 4


def test_an_answer_with_every_token_forbidden_is_an_error(llm):
    params = SamplingParams(temperature=1.0, stop_token_ids=range(768), min_tokens=2)
    output = llm.generate_multimodal([GOOD], params, on_error="return")[0]
    assert "every token is forbidden" in output.error


@pytest.mark.parametrize("where", ["run", "postprocess"])
@pytest.mark.parametrize("at", range(6))
def test_an_interrupted_step_does_not_spoil_the_requests_of_others(where, at, checkpoint, make_llm, monkeypatch):
    """Copies on write that were scheduled and not made would leave the answers of n > 1 with another's KV."""
    llm = make_llm(checkpoint, kvcache_block_size=4, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=8, ignore_eos=True, n=3)
    want = llm.generate("Count the shapes.", SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids
    other = llm.engine.add_request("Count the shapes.", params)
    for _ in range(at):
        llm.engine.step()
    owner = llm.engine.model_runner if where == "run" else llm.engine.scheduler
    monkeypatch.setattr(owner, where, lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate("x", SHORT)
    monkeypatch.undo()
    outputs = []
    while not llm.engine.is_finished():
        outputs += llm.engine.step()[0]
        llm.engine.scheduler.check()
    assert outputs[0].request_id == other
    assert [completion.token_ids for completion in outputs[0].completions] == [want] * 3


def test_streams_may_be_interleaved(llm):
    first = llm.stream_multimodal([ask(f"a {i}", request_id=f"a{i}") for i in range(5)], SHORT)
    second = llm.stream_multimodal([ask(f"b {i}", request_id=f"b{i}") for i in range(5)], SHORT)
    seen = [output.request_id for pair in zip(first, second, strict=True) for output in pair]
    assert sorted(seen) == sorted([f"a{i}" for i in range(5)] + [f"b{i}" for i in range(5)])


BAD = {
    "no messages": ({"messages": None}, "'messages' must be a list"),
    "no such file": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "/no/such.png"}]}]},
        "image 0: .*no such file",
    ),
    "second image": (ask(noise_image(50, 50), b"\x89PNG nonsense", "x"), "image 1: .*not an image"),
    "narrow": (ask(noise_image(1, 1000), "x"), "image 0: .*long side"),
    "too many placeholders": (
        {"text": "<|vision_start|><|image_pad|><|vision_end|><|image_pad|>", "images": [noise_image(50, 50)]},
        r"1 image placeholder, 1 <\|image_pad\|> outside .* but 1 image was given",
    ),
    "too few placeholders": (
        {"text": "<|image_pad|>", "images": [noise_image(50, 50), noise_image(60, 50)]},
        r"0 image placeholders, 1 <\|image_pad\|> outside .* but 2 images were given",
    ),
    "literal placeholder": (
        ask("look: <|image_pad|>"),
        r"0 image placeholders, 1 <\|image_pad\|> outside .* but 0 images were given",
    ),
    "empty prompt": ({"text": ""}, "prompt is empty"),
    "too long": (ask("shape " * 2000), r"prompt has \d+ tokens, max_model_len is 1024"),
    "too long, with a picture": (
        ask(noise_image(60, 60), "shape " * 2000),
        r"prompt has \d+ tokens \(\d+ of them from images\), .* shorten it, lower max_pixels or raise max_model_len",
    ),
    "unknown key": ({"message": "x"}, "unknown keys message"),
    "not a dict": ("describe", "must be a dict"),
    "bad parameters": (ask("x", sampling_params={"temprature": 1}), "temprature"),
    "bad request_id": (ask("x", request_id=5), r"request_id is 5, must be str \| None"),
    "bad priority": (ask("x", priority="high"), "priority is 'high', must be int"),
    "half a character": (ask("b\udcff"), "not valid Unicode"),
    "bad salt": (ask("x", cache_salt=b"x"), "cache_salt is b'x'"),
    "bad value": (ask("x", sampling_params={"temperature": -1}), "temperature is -1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_isolated_or_raised_and_the_engine_lives_on(name, llm):
    bad, message = BAD[name]
    want = llm.generate_multimodal([GOOD], SHORT)[0].token_ids
    outputs = llm.generate_multimodal([GOOD, bad, GOOD], SHORT, on_error="return")
    assert [output.token_ids for output in outputs] == [want, [], want]
    assert outputs[1].finish_reason == "error" and outputs[0].error is None
    with pytest.raises(ValueError, match=message):
        raise ValueError(outputs[1].error)
    with pytest.raises(ValueError, match="request 1: .*" + message):
        llm.generate_multimodal([GOOD, bad, GOOD], SHORT)
    assert_idle(llm)
    assert llm.generate_multimodal([GOOD], SHORT)[0].token_ids == want


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("", "prompt is empty"),
        ("b\udcff", "not valid Unicode"),
        ([], "prompt is empty"),
        ([5, 768], r"prompt has 768, token ids are integers in \[0, 768\)"),
        ([5, -1], "prompt has -1"),
        ([5, "a"], "prompt has 'a'"),
        (7, "must be a string or a list of token ids"),
        ([1] * 1024, "prompt has 1024 tokens"),
    ],
)
def test_bad_prompts_are_named_by_index(prompt, message, llm):
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        llm.generate(["fine", prompt], SHORT)


def test_automatic_request_ids_keep_clear_of_the_users(llm):
    bad = {"text": ""}
    requests = [ask("x"), ask("x", request_id="0"), ask("x", request_id="auto-2"), ask("x"), bad, ask("x"), bad]
    outputs = llm.generate_multimodal(requests, SHORT, on_error="return")
    assert [output.error is None for output in outputs] == [True, True, True, True, False, True, False]
    assert len({output.request_id for output in outputs}) == len(requests)


def test_request_ids_in_flight_are_unique(llm):
    llm.engine.add_request("x", SHORT, "a")
    with pytest.raises(ValueError, match="request_id 'a' is already in flight"):
        llm.engine.add_request("y", SHORT, "a")
    assert llm.engine.abort_request("a").num_prompt_tokens == 1
    llm.engine.abort_request(llm.engine.add_request("y", SHORT, "a"))


def test_on_error_is_checked(llm):
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        llm.generate_multimodal([GOOD], SHORT, on_error="ignore")


def test_too_few_sampling_params(llm):
    with pytest.raises(ValueError, match="request 1: 1 sampling_params were given"):
        llm.generate_multimodal([GOOD, GOOD], [SHORT])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pixel_values": torch.zeros(8, 1176)}, "pixel_values have shapes"),
        ({"image_grid_thw": [(1, 3, 4)]}, "multiples of 2"),
        ({"image_grid_thw": [(0, 4, 4)]}, "must be positive"),
        ({"image_grid_thw": [(1, 4, 4), (1, 4, 4)]}, "image"),
        ({"image_grid_thw": None}, "4 image placeholder"),
        ({"vision_placeholders": [(1, 4)]}, "not where the prompt's image tokens are"),
        ({"vision_placeholders": [(0, 3)]}, "have lengths"),
        ({"image_digests": [b"1", b"2"]}, "2 image_digests"),
        ({"image_digests": [[]]}, "each must be bytes"),
        ({"arrival_time": "now"}, "arrival_time is 'now'"),
    ],
)
def test_bad_tensors_are_refused_at_the_door(changes, message, llm):
    ids = [llm.engine.model_config.image_token_id] * 4 + [5]
    good = {"pixel_values": torch.zeros(16, 1176), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(ValueError, match=message):
        llm.engine.add_request(ids, SHORT, **{**good, **changes})
    llm.engine.abort_request(llm.engine.add_request(ids, SHORT, **good))


def test_a_picture_larger_than_the_encoder_cache_is_refused(checkpoint, make_llm):
    small = make_llm(checkpoint, encoder_cache_bytes=64 * 4)
    with pytest.raises(ValueError, match=r"image 0: has 6 tokens, .* encoder_cache_bytes is 256"):
        small.generate_multimodal([GOOD], SHORT)


def test_max_model_len_must_fit(checkpoint, make_llm):
    with pytest.raises(ValueError, match="max_model_len is 2000, the checkpoint was made for at most 1024"):
        make_llm(checkpoint, max_model_len=2000)
    with pytest.raises(ValueError, match="max_model_len is 500, but the KV cache holds 160 tokens"):
        make_llm(checkpoint, max_model_len=500, num_kvcache_blocks=10)
    cut = make_llm(checkpoint, max_model_len=40)
    output = cut.generate("Count.", SamplingParams(max_tokens=200, ignore_eos=True))[0]
    assert output.num_prompt_tokens + len(output.token_ids) == 40 and output.finish_reason == "length"


def test_a_failed_step_ends_its_requests_and_the_engine_lives_on(llm, monkeypatch):
    want = llm.generate_multimodal([GOOD], SHORT)[0].token_ids

    def out_of_memory(*arguments):
        monkeypatch.undo()
        raise torch.OutOfMemoryError("tried to allocate 8 GiB")

    monkeypatch.setattr(llm.engine.model_runner, "run", out_of_memory)
    failed = llm.generate_multimodal([GOOD], SHORT, on_error="return")[0]
    assert failed.finish_reason == "error" and "tried to allocate 8 GiB" in failed.error
    assert llm.generate_multimodal([GOOD], SHORT)[0].token_ids == want
    monkeypatch.setattr(llm.engine.model_runner, "run", out_of_memory)
    with pytest.raises(RuntimeError, match="request 0: the step failed: OutOfMemoryError"):
        llm.generate_multimodal([GOOD], SHORT)


def test_abort_returns_what_there_is(llm):
    engine = llm.engine
    request_id = engine.add_request("Count the shapes.", SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(3):
        engine.step()
    output = engine.abort_request(request_id)
    assert output.finish_reason == "aborted" and len(output.token_ids) == 3
    assert engine.abort_request(request_id) is None and engine.abort_request("nonsense") is None


def test_closing_a_stream_aborts_what_is_left(llm):
    stream = llm.stream_multimodal([GOOD] * 20, SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.engine.is_finished()


def test_a_request_aborted_from_outside_ends_its_wait(llm, monkeypatch):
    step, groups = llm.engine.step, llm.engine.scheduler.groups

    def abort_and_step():
        if "lost" in groups:
            llm.engine.abort_request("lost")
        return step()

    monkeypatch.setattr(llm.engine, "step", abort_and_step)
    requests = [ask("x", request_id="lost"), ask("y", request_id="kept")]
    lost, kept = llm.generate_multimodal(requests, SHORT, on_error="return")
    assert lost.error is None and lost.finish_reason == "aborted"
    assert kept.error is None and kept.finish_reason == "length"
    with pytest.raises(RequestsAborted, match="request 0: aborted") as raised:
        llm.generate_multimodal(requests, SHORT)
    assert [output.finish_reason for output in raised.value.outputs] == ["aborted", "length"]
    assert raised.value.outputs[1].token_ids == kept.token_ids


def test_a_stream_over_an_engine_that_has_exited_raises(checkpoint, make_llm):
    llm = make_llm(checkpoint)
    stream = llm.stream_multimodal([ask("x", sampling_params=SHORT), ask("y")], SamplingParams(max_tokens=50))
    next(stream)
    llm.exit()
    with pytest.raises(RuntimeError, match="the engine has exited"):
        list(stream)


def test_pictures_that_wait_in_the_engine_are_bounded_in_bytes(llm, monkeypatch):
    """Room for two that wait beside those that run: the others stay in the prefetcher, which is bounded too."""
    size = sum(pixels.nbytes for pixels in patches_of(llm.processor(GOOD)))
    monkeypatch.setattr("mmvllm.intake.MAX_BYTES", 2 * size)
    # Before each step there come as many as there is room for, however slowly they are prepared.
    monkeypatch.setattr(Prefetcher, "get", lambda self, wait, get=Prefetcher.get: get(self, wait=True))
    held, step = [], llm.engine.step
    groups = llm.engine.scheduler.groups

    def watched():
        held.append([group.has_begun for group in groups.values()])
        return step()

    monkeypatch.setattr(llm.engine, "step", watched)
    assert len(llm.generate_multimodal([GOOD] * 7, SHORT)) == 7
    assert max(begun.count(False) for begun in held) <= 2 < max(map(len, held)) <= 2 + llm.engine.config.max_num_seqs


def test_an_interrupt_leaves_nothing_behind(llm, monkeypatch):
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate_multimodal([GOOD] * 3, SHORT)
    monkeypatch.setattr(llm.engine, "step", step)
    assert llm.engine.is_finished()


@pytest.mark.parametrize("max_model_len", [2, 3, 5])
def test_the_shortest_models_warm_up_too(max_model_len, checkpoint, make_llm):
    llm = make_llm(checkpoint, max_model_len=max_model_len, skip_warmup=False, encoder_cache_bytes=1)
    assert len(llm.generate([[5]], SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids) == max_model_len - 1


def test_no_remote_code_runs_even_if_the_user_would_say_yes(checkpoint, tmp_path, monkeypatch):
    shutil.copytree(checkpoint, tmp_path / "evil")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.T", "evil.T"]}}
    (tmp_path / "evil" / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    with contextlib.suppress(ValueError):
        LLM(tmp_path / "evil", skip_warmup=True, num_kvcache_blocks=64).exit()
    assert not (tmp_path / "ran").exists()


def test_a_damaged_chat_template_is_named(checkpoint, make_llm, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "damaged")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert make_llm(folder).processor(GOOD).token_ids == make_llm(checkpoint).processor(GOOD).token_ids
    for content in ("{", "[]", "{}"):
        (folder / "chat_template.json").write_text(content)
        with pytest.raises(ValueError, match=r"chat_template.json is damaged"):
            make_llm(folder)


def test_picture_settings_that_do_not_fit_the_vit_are_refused(checkpoint, make_llm, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "other")
    (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16}))
    with pytest.raises(ValueError, match=r"\(16, 2, 2\), vision_config needs \(14, 2, 2\)"):
        make_llm(folder)


def test_warm_up_and_exit(checkpoint):
    engine = LLMEngine(checkpoint)
    assert engine.warmup_model() > 0
    assert engine.is_finished()
    engine.exit()
    engine.exit()
    with pytest.raises(RuntimeError, match="has exited"):
        engine.add_request("x")


def test_an_engine_is_freed_when_it_is_dropped(checkpoint):
    llm = LLM(checkpoint, skip_warmup=True, num_kvcache_blocks=64)
    ref = weakref.ref(llm.engine)
    del llm
    gc.collect()
    assert ref() is None


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
