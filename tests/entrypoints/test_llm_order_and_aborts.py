"""Priority of listed requests, and aborts from another thread while a call waits."""

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.engine.request_batch import RequestBatch
from mmvllm.errors import RequestError, RequestsAborted
from mmvllm.processors.videos.load import Load
from tests.helpers.engine.requests import ask, noise_image

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
ENGINE = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 128, "skip_warmup": True}
IMAGE = noise_image(90, 60)


@pytest.mark.parametrize("call", ["generate_multimodal", "stream_multimodal"])
def test_a_list_begins_in_the_order_of_priority(call, checkpoint, make_llm):
    """One runs at a time and the engine holds two: the last of the list still begins first."""
    llm = make_llm(checkpoint, max_num_seqs=1)
    requests = [ask("Count.", request_id=str(i), priority=-i) for i in range(9)]
    params = [SamplingParams(max_tokens=i + 1, ignore_eos=True) for i in range(9)]
    outputs = list(getattr(llm, call)(requests, params))
    by_id = {int(output.request_id): output for output in outputs}
    assert sorted(by_id, key=lambda i: by_id[i].finish_time) == list(range(8, -1, -1))
    assert [len(by_id[i].token_ids) for i in range(9)] == list(range(1, 10)), "each has its own parameters"
    if call == "generate_multimodal":
        assert list(by_id) == list(range(9))


def test_errors_name_the_callers_index_whatever_the_priority(llm):
    requests = [ask("x"), {**ask("y"), "priority": -5, "min_pixels": 0}, ask("z")]
    with pytest.raises(RequestError, match=r"request 1: min_pixels must be an integer .*, got 0"):
        llm.generate_multimodal(requests, SHORT)


LONG = SamplingParams(max_tokens=800, ignore_eos=True, n=2)


@pytest.fixture
def abort(monkeypatch):
    """abort(llm, request_id) aborts a request from another thread: between two steps, once it has some tokens."""
    real_step = RequestBatch.step
    with ThreadPoolExecutor(1) as thread:

        def begin(llm, request_id: str, num_tokens: int = 0) -> None:
            aborted: list[Future] = []

            def step(batch: RequestBatch) -> list:
                group = llm.engine.scheduler.groups.get(request_id)
                if group is not None and group.seqs[0].num_completion_tokens >= num_tokens and not aborted:
                    aborted.append(thread.submit(llm.abort_request, request_id))
                    assert aborted[0].result(60) is not None
                return real_step(batch)

            monkeypatch.setattr(RequestBatch, "step", step)

        yield begin


def long_requests() -> list[dict]:
    return [ask("Count.", request_id="lost", sampling_params=LONG), ask("Count.", request_id="kept")]


def test_an_abort_returns_the_text_so_far(llm, abort):
    abort(llm, "lost", num_tokens=3)
    lost, kept = llm.generate_multimodal(long_requests(), SHORT, on_error="return", use_tqdm=False)
    assert [each.finish_reason for each in lost.outputs] == ["aborted", "aborted"] and lost.error is None
    assert kept.finish_reason == "length" and len(kept.token_ids) == 4
    assert lost.text == llm.tokenizer.decode(lost.token_ids, skip_special_tokens=True) and len(lost.token_ids) == 3
    assert lost.token_ids[:4] == kept.token_ids[: len(lost.token_ids)]


def test_an_abort_is_raised_once_the_others_have_finished(llm, abort):
    abort(llm, "lost", num_tokens=3)
    with pytest.raises(RequestsAborted, match="request 0: aborted") as raised:
        llm.generate_multimodal(long_requests(), SHORT, use_tqdm=False)
    lost, kept = raised.value.outputs
    assert (lost.request_id, lost.finish_reason) == ("lost", "aborted")
    assert (kept.request_id, kept.finish_reason, len(kept.token_ids)) == ("kept", "length", 4)


def test_an_abort_of_a_request_that_waits_in_the_engine(checkpoint, make_llm, abort):
    """It has no text; what runs is not affected."""
    llm = make_llm(checkpoint, max_num_seqs=1)
    first = {**ask("Count.", request_id="first"), "sampling_params": {"max_tokens": 60, "ignore_eos": True}}
    abort(llm, "second")
    requests = [first, ask("Wait.", request_id="second")]
    outputs = llm.generate_multimodal(requests, SHORT, on_error="return", use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["length", "aborted"]
    assert len(outputs[0].token_ids) == 60


def test_a_request_that_the_engine_does_not_have_yet_cannot_be_aborted(llm):
    aborted = []

    def requests():
        yield ask("x", request_id="first")
        aborted.append(llm.abort_request("second"))
        yield ask("y", request_id="second")

    outputs = list(llm.stream_multimodal(requests(), SHORT))
    assert aborted == [None] and [output.finish_reason for output in outputs] == ["length", "length"]


def test_async_llm_aborts_a_request_that_is_not_prepared_yet(checkpoint):
    """Every completion of it ends, and the loader never sees the engine."""
    may_load = threading.Event()

    def load(source):
        assert may_load.wait(20)
        return source

    async def online() -> list:
        async with AsyncLLM(checkpoint, **ENGINE) as engine:
            deltas = []

            async def consume() -> None:
                async for delta in engine.generate(ask(IMAGE, "What?"), LONG, "r", load=Load(image=load)):
                    deltas.append(delta)

            task = asyncio.create_task(consume())
            while engine.position("r") is None:
                await asyncio.sleep(0.005)
            assert await engine.abort("r")
            may_load.set()
            await task
            assert engine.position("r") is None
            return deltas

    deltas = asyncio.run(online())
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [(0, "aborted"), (1, "aborted")]
    assert [each.finish_reason for each in deltas[-1].output.outputs] == ["aborted", "aborted"]
