"""After an error that ends the CUDA context, requests fail with the reason and the engine refuses further work."""

import asyncio

import pytest
import torch

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.errors import EngineFailed
from mmvllm.sampling.sampler import AsyncSamplerOutput
from mmvllm.worker.device_errors import is_fatal
from tests.helpers.engine.async_engines import OPTIONS, QUESTION, SHORT, async_test, collect
from tests.helpers.engine.requests import ask

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call."
ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + ADVICE)
FATAL = [
    ILLEGAL,
    torch.AcceleratorError("CUDA error: invalid device function"),
    RuntimeError("CUDA error: device-side assert triggered" + ADVICE),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
]
RECOVERABLE = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB"),
    torch.AcceleratorError("CUDA error: out of memory" + ADVICE),
    MemoryError(),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA error: an illegal memory access was encountered"),
    KeyboardInterrupt(),
]
REQUESTS = [ask(text) for text in "abcdef"]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
REASON = "the engine failed: AcceleratorError: CUDA error: an illegal memory access was encountered"


@pytest.fixture
def make(checkpoint, make_llm):
    def make(ahead=False, **options):
        return make_llm(checkpoint, async_scheduling=ahead, **options)

    return make


def fail_at(owner, where: str, at: int, error: Exception, monkeypatch) -> list[None]:
    """Every call of `owner.where` from number `at` on raises; returns a list that grows with the calls."""
    original, calls = getattr(owner, where), []

    def failing(*args):
        calls.append(None)
        if len(calls) > at:
            raise error
        return original(*args)

    monkeypatch.setattr(owner, where, failing)
    return calls


def owner_of(where: str, engine):
    return engine.model_runner if where == "run" else AsyncSamplerOutput


@pytest.mark.parametrize("error", FATAL, ids=str)
def test_errors_that_end_the_context_are_fatal(error):
    assert is_fatal(error)


@pytest.mark.parametrize("error", RECOVERABLE, ids=repr)
def test_other_errors_are_not(error):
    assert not is_fatal(error)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "ahead"])
@pytest.mark.parametrize("where", ["run", "tokens"])
@pytest.mark.parametrize("at", [0, 3])
def test_all_requests_fail_and_no_step_runs_afterwards(where, at, ahead, make, monkeypatch):
    """Two requests run and four wait when the device is lost."""
    llm = make(ahead, max_num_seqs=2)
    groups = [llm.engine.add(llm.processor(request), GREEDY) for request in REQUESTS]
    calls = fail_at(owner_of(where, llm.engine), where, at, ILLEGAL, monkeypatch)
    with pytest.raises(EngineFailed) as failure:
        while not llm.engine.is_finished():
            llm.engine.step()
    assert str(failure.value) == REASON and failure.value.__cause__ is ILLEGAL
    assert [group.output.error for group in groups] == [REASON] * 6
    assert llm.engine.is_finished() and llm.engine._ahead is None
    llm.engine.scheduler.check()
    num_calls = len(calls)
    for refused in (llm.engine.step, lambda: llm.engine.add(llm.processor(REQUESTS[0]))):
        with pytest.raises(EngineFailed, match=REASON):
            refused()
    assert len(calls) == num_calls


@pytest.mark.parametrize("where", ["run", "tokens"])
@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_llm_raises_engine_failed_in_every_later_call(on_error, where, make, monkeypatch):
    llm = make(max_num_seqs=2)
    fail_at(owner_of(where, llm.engine), where, 2, ILLEGAL, monkeypatch)
    for _ in range(2):
        with pytest.raises(EngineFailed, match=REASON):
            llm.generate_multimodal(REQUESTS, GREEDY, use_tqdm=False, on_error=on_error)
    with pytest.raises(EngineFailed, match=REASON):
        llm.generate(["a"], GREEDY, use_tqdm=False)
    llm.exit()


@async_test
@pytest.mark.parametrize("where", ["run", "tokens"])
async def test_async_llm_fails_with_the_reason(where, checkpoint, monkeypatch):
    engine = AsyncLLM(checkpoint, **OPTIONS, max_num_seqs=2)
    calls = fail_at(owner_of(where, engine._engine), where, 2, ILLEGAL, monkeypatch)
    tasks = [asyncio.create_task(collect(engine, request, GREEDY)) for request in REQUESTS]
    for task in tasks:
        with pytest.raises(EngineFailed) as failure:
            await task
        assert str(failure.value) == REASON
    num_calls, health = len(calls), engine.health()
    assert (health.status, f"the engine failed: {health.reason}", health.is_live) == ("failed", REASON, False)
    with pytest.raises(EngineFailed, match=REASON):
        await collect(engine, QUESTION, SHORT)
    await engine.shutdown()
    assert len(calls) == num_calls and engine.health().status == "failed"


def test_exit_of_a_lost_device_neither_raises_nor_keeps_requests(make, monkeypatch):
    """CUDA reports the error to every call, those that wait for the device and free memory included."""
    llm = make()
    group = llm.engine.add(llm.processor(REQUESTS[0]), GREEDY)
    lost = []

    def raise_illegal(*_):
        lost.append(None)
        raise ILLEGAL

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, raise_illegal)
    monkeypatch.setattr(llm.engine.model_runner, "device", torch.device("cuda"))
    llm.exit()
    assert len(lost) == 2 and group.output.finish_reason == "aborted"
    llm.exit()
