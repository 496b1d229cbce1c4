"""Cancellation, abort and deadline at every stage of a request."""

import asyncio
import contextlib
import threading

import pytest

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.errors import DeadlineExceeded
from mmvllm.processors.images.load import load_image
from mmvllm.processors.videos.load import Load
from tests.helpers.engine.async_engines import (
    LONG,
    QUESTION,
    BlockedLoad,
    async_test,
    collect,
    reached,
)


async def _at_stage(engine: AsyncLLM, stage: str, others: contextlib.AsyncExitStack):
    """A task whose request "it" has reached a stage and stays there until `others` closes."""
    blocked = BlockedLoad()
    others.callback(blocked.may_return.set)
    if stage in ("queued for preparation", "waiting in the engine"):
        for _ in range(8 if stage == "queued for preparation" else 4):
            load = blocked if stage == "queued for preparation" else load_image
            blocker = engine.generate(QUESTION, LONG, load=Load(image=load))
            task = asyncio.create_task(anext(blocker))
            others.push_async_callback(_close, task, blocker)
            if stage == "waiting in the engine":
                await task
    load = blocked if stage == "being prepared" else load_image
    task = asyncio.create_task(collect(engine, QUESTION, LONG, request_id="it", load=Load(image=load)))
    groups = engine._engine.scheduler.groups
    if stage == "being prepared":
        await reached(blocked.is_reached.is_set, "prepared")
    elif stage == "waiting in the engine":
        await reached(lambda: "it" in groups, "in the engine")
    elif stage == "generating":
        await reached(lambda: "it" in groups and groups["it"].first_seq.num_completion_tokens > 3, "generating")
    else:
        await reached(lambda: "it" in engine._streams, "admitted")
    return task


async def _close(task, stream) -> None:
    task.cancel()
    with contextlib.suppress(BaseException):
        await task
    await stream.aclose()


STAGES = pytest.mark.parametrize(
    "stage", ["queued for preparation", "being prepared", "waiting in the engine", "generating"]
)


@STAGES
@async_test
async def test_cancelling_the_task_removes_the_request(engine, stage):
    async with contextlib.AsyncExitStack() as others:
        task = await _at_stage(engine, stage, others)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "it" not in engine._streams
        await reached(lambda: "it" not in engine._engine.scheduler.groups, "aborted")


@STAGES
@async_test
async def test_abort_ends_the_stream_with_the_tokens_generated_so_far(engine, stage):
    async with contextlib.AsyncExitStack() as others:
        task = await _at_stage(engine, stage, others)
        assert await engine.abort("it")
        assert "it" not in engine._engine.scheduler.groups and "it" not in engine._streams
        deltas = (await task)[0]
        assert deltas[-1].finish_reason == "aborted" and not await engine.abort("it")
        assert [c.finish_reason for c in deltas[-1].output.completions] == ["aborted"]
        assert deltas[-1].output.error is None and deltas[-1].output.arrival_time < deltas[-1].output.finish_time
        if stage == "generating":
            completion = deltas[-1].output.completions[0]
            assert "".join(delta.text for delta in deltas) == completion.text
            assert len(completion.token_ids) > 3


@contextlib.asynccontextmanager
async def _during_a_step(engine: AsyncLLM, monkeypatch):
    """The engine is in a step, which ends when the context does."""
    real, begun, may_end = engine._engine.step, threading.Event(), threading.Event()

    def step():
        begun.set()
        assert may_end.wait(20)
        return real()

    async with contextlib.aclosing(engine.generate("continue", LONG)) as stream:
        await anext(stream)
        monkeypatch.setattr(engine._engine, "step", step)
        await reached(begun.is_set, "in a step")
        try:
            yield
        finally:
            may_end.set()


@async_test
async def test_an_abort_takes_effect_even_if_its_caller_times_out(engine, monkeypatch):
    task = asyncio.create_task(collect(engine, QUESTION, LONG, request_id="it"))
    await reached(lambda: "it" in engine._engine.scheduler.groups, "in the engine")
    async with _during_a_step(engine, monkeypatch):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.abort("it"), 0.01)
    assert (await task)[0][-1].finish_reason == "aborted" and "it" not in engine._streams


@async_test
async def test_a_request_aborted_between_preparation_and_engine_is_not_added(engine, monkeypatch):
    blocked = BlockedLoad()
    task = asyncio.create_task(collect(engine, QUESTION, LONG, request_id="it", load=Load(image=blocked)))
    await reached(blocked.is_reached.is_set, "prepared")
    async with _during_a_step(engine, monkeypatch):
        aborting = asyncio.create_task(engine.abort("it"))
        await reached(lambda: len(engine._thread._commands) == 1, "asked for the abort")
        blocked.may_return.set()
        await reached(lambda: len(engine._thread._commands) == 2, "prepared")
    assert await aborting and (await task)[0][-1].finish_reason == "aborted"
    assert "it" not in engine._engine.scheduler.groups


@pytest.mark.parametrize("stage", ["being prepared", "waiting in the engine", "generating"])
@async_test
async def test_the_deadline_applies_at_every_stage(engine, stage):
    blocked, blockers = BlockedLoad(), []
    if stage == "waiting in the engine":
        blockers = [engine.generate(QUESTION, LONG) for _ in range(4)]
        await asyncio.gather(*(anext(blocker) for blocker in blockers))
    load = blocked if stage == "being prepared" else load_image
    with pytest.raises(DeadlineExceeded, match=r"not finished after 0\.1 seconds"):
        await collect(engine, QUESTION, LONG, timeout=0.1, load=Load(image=load))
    blocked.may_return.set()
    for blocker in blockers:
        await blocker.aclose()


@async_test
async def test_leaving_the_async_for_loop_early_aborts(engine):
    async with contextlib.aclosing(engine.generate(QUESTION, LONG)) as stream:
        async for _ in stream:
            break
    assert not engine._streams


@async_test
async def test_an_abort_during_preparation_ends_every_completion(engine):
    blocked = BlockedLoad()
    params = SamplingParams(n=3, max_tokens=5)
    task = asyncio.create_task(collect(engine, QUESTION, params, request_id="it", load=Load(image=blocked)))
    await reached(blocked.is_reached.is_set, "prepared")
    await engine.abort("it")
    deltas, texts = await task
    blocked.may_return.set()
    assert texts == ["", "", ""] and [delta.finish_reason for delta in deltas] == ["aborted"] * 3
