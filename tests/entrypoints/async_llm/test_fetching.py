"""Requests that are fetched by a coroutine function after admission."""

import asyncio
import gc

import pytest

from mmvllm.entrypoints import request_queue
from mmvllm.errors import DeadlineExceeded, EngineBusy, EngineStopped, RequestFailed
from tests.helpers.engine.async_engines import (
    QUESTION,
    SHORT,
    async_test,
    collect,
    reached,
)


async def fetched() -> dict:
    return QUESTION


@async_test
async def test_a_request_may_be_a_coroutine_function(engine):
    deltas, _ = await collect(engine, fetched, SHORT)
    assert len(deltas[-1].output.token_ids) == 6

    async def fail():
        raise KeyError("no such host")

    with pytest.raises(KeyError, match="no such host"):
        await collect(engine, fail, SHORT)


@async_test
async def test_a_request_that_is_not_admitted_is_not_fetched(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine, "admission", request_queue.AdmissionWindow(0))
    with pytest.raises(EngineBusy):
        await collect(engine, None, SHORT)  # None cannot be called


@async_test
async def test_a_fetch_cancelled_by_another_task_fails_its_request(engine):
    shared = asyncio.create_task(asyncio.sleep(60))
    tasks = [asyncio.create_task(collect(engine, lambda: asyncio.wait_for(shared, None), SHORT)) for _ in range(2)]
    await reached(lambda: len(engine._streams) == 2, "admitted")
    shared.cancel()
    for task in tasks:
        with pytest.raises(RequestFailed, match="could not be fetched: CancelledError"):
            await asyncio.wait_for(task, 20)


@pytest.mark.parametrize("own", [{"request_id": "mine"}, {"sampling_params": {"max_tokens": 2}}])
@async_test
async def test_a_fetched_request_may_not_set_what_admission_needs(engine, own):
    async def fetch():
        return QUESTION | own

    with pytest.raises(ValueError, match=f"must not contain {next(iter(own))}; pass it to"):
        await collect(engine, fetch, SHORT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from the abandoned task
@pytest.mark.parametrize("how", ["the next request", "drain"])
def test_a_loop_that_is_closed_during_a_fetch_releases_its_admission(make_engine, how):
    engine = make_engine(max_num_seqs=1, max_waiting=0)
    loop = asyncio.new_event_loop()
    task = loop.create_task(collect(engine, asyncio.Event().wait, SHORT))
    loop.run_until_complete(reached(lambda: engine._streams, "admitted"))
    loop.close()
    if how == "drain":
        asyncio.run(asyncio.wait_for(engine.shutdown(timeout=20), 10))
    else:
        deltas, _ = asyncio.run(collect(engine, QUESTION, SHORT))
        assert len(deltas[-1].output.token_ids) == 6
    assert not engine._streams
    del task
    gc.collect()  # here, where its warnings are ignored


@pytest.mark.parametrize("how", ["deadline", "abort", "cancel", "shutdown", "drain"])
@async_test
async def test_a_fetch_is_cancelled_or_completed_with_its_request(make_engine, how):
    engine = make_engine()
    is_here, is_begun, ends = asyncio.Event(), asyncio.Event(), []

    async def fetch():
        is_begun.set()
        try:
            await is_here.wait()
        finally:
            ends.append(how)
        return QUESTION

    timeout = 0.05 if how == "deadline" else None
    task = asyncio.create_task(collect(engine, fetch, SHORT, request_id="it", timeout=timeout))
    await is_begun.wait()
    if how != "deadline":  # it may be over by now
        assert engine.stats().num_preparing == 1 and engine.position("it") == 1
    if how == "deadline":
        with pytest.raises(DeadlineExceeded, match=r"after 0\.05 seconds"):
            await task
    elif how == "abort":
        assert await engine.abort("it")
        assert (await task)[0][-1].finish_reason == "aborted"
    elif how == "cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how == "shutdown":
        await engine.shutdown(drain=False)
        with pytest.raises(EngineStopped):
            await task
    else:
        closing = asyncio.create_task(engine.shutdown())
        await reached(lambda: engine.health().status == "draining", "draining")
        is_here.set()
        assert len((await task)[0][-1].output.token_ids) == 6
        await closing
    while not ends:
        await asyncio.sleep(0)
    assert not engine._streams
