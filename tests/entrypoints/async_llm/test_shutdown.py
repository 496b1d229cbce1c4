"""Failed steps, a failed engine, and shutdown with and without draining."""

import asyncio
import subprocess
import sys

import pytest

from mmvllm import SamplingParams
from mmvllm.entrypoints import async_llm
from mmvllm.errors import EngineFailed, EngineStopped, RequestFailed
from mmvllm.processors.videos.load import Load
from tests.helpers.engine.async_engines import (
    LONG,
    QUESTION,
    SHORT,
    BlockedLoad,
    async_test,
    collect,
    reached,
)
from tests.helpers.engine.requests import ask


@async_test
async def test_a_failed_step_fails_its_requests_and_not_later_ones(make_engine, monkeypatch):
    engine = make_engine()
    real, calls = engine._engine.model_runner.run, []

    def fail_once(*args):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("device error")
        return real(*args)

    monkeypatch.setattr(engine._engine.model_runner, "run", fail_once)
    with pytest.raises(RequestFailed, match="device error"):
        await collect(engine, QUESTION, SHORT)
    assert engine.health().status == "failing" and "device error" in engine.health().reason
    assert engine.health().is_ready
    await collect(engine, QUESTION, SHORT)
    assert engine.health() == async_llm.EngineHealth("ok")


@async_test
async def test_a_failed_engine_fails_all_requests_with_the_reason(make_engine, monkeypatch):
    engine = make_engine(max_num_seqs=2)
    blocked = BlockedLoad()
    tasks = [asyncio.create_task(collect(engine, ask("continue"), LONG)) for _ in range(3)]
    tasks.append(asyncio.create_task(collect(engine, QUESTION, LONG, load=Load(image=blocked))))
    await reached(lambda: engine.stats().num_running == 2 and blocked.is_reached.is_set(), "in flight")

    def broken():
        raise AssertionError("block 3 is held twice")

    monkeypatch.setattr(engine._engine.scheduler, "schedule", broken)
    for task in tasks:
        with pytest.raises(EngineFailed, match="AssertionError: block 3 is held twice"):
            await task
    blocked.may_return.set()
    health = engine.health()
    assert health.status == "failed" and "block 3" in health.reason and not health.is_live and not health.is_ready
    with pytest.raises(EngineFailed, match="block 3"):
        await collect(engine, QUESTION, SHORT)
    assert not await engine.abort("request-1") and not engine._streams
    await engine.shutdown()
    assert engine.health().status == "failed"


@pytest.mark.slow
@async_test
async def test_a_shutdown_that_drains_completes_requests_in_flight(make_engine):
    engine = make_engine(max_num_seqs=2)
    tasks = [asyncio.create_task(collect(engine, ask(f"q{i}"), SamplingParams(max_tokens=50))) for i in range(6)]
    await reached(lambda: engine.stats().num_running or engine.stats().num_finished, "running")
    closing = asyncio.create_task(engine.shutdown())
    await reached(lambda: engine.health().status != "ok", "draining")
    with pytest.raises(EngineStopped, match="shutting down"):
        await collect(engine, QUESTION, SHORT)
    for deltas, _ in await asyncio.gather(*tasks):
        assert deltas[-1].finish_reason in ("eos", "length")
    await closing
    assert engine.health().status == "stopped"
    await engine.shutdown()  # a second shutdown has no effect


@pytest.mark.parametrize("how", [{"drain": False}, {"drain": True, "timeout": 0.05}], ids=["no drain", "drain timeout"])
@async_test
async def test_requests_that_a_shutdown_does_not_complete_fail_with_engine_stopped(make_engine, how):
    engine = make_engine(max_num_seqs=1)
    tasks = [asyncio.create_task(collect(engine, ask("continue"), LONG)) for _ in range(3)]
    await reached(lambda: engine.stats().num_running, "running")
    await engine.shutdown(**how)
    for task in tasks:
        with pytest.raises(EngineStopped, match="shut down before the completion was finished"):
            await task
    assert engine.health().status == "stopped" and not engine.health().is_live


@async_test
async def test_a_second_shutdown_without_draining_ends_the_first(make_engine):
    engine = make_engine()
    task = asyncio.create_task(collect(engine, ask("continue"), LONG))
    await reached(lambda: engine.stats().num_running, "running")
    draining = asyncio.create_task(engine.shutdown())
    await reached(lambda: engine.health().status == "draining", "draining")
    await engine.shutdown(drain=False)
    await draining
    with pytest.raises(EngineStopped):
        await task


@pytest.mark.spawns
def test_a_program_that_does_not_shut_down_still_exits(checkpoint):
    code = f"""
import asyncio
from mmvllm import AsyncLLM, SamplingParams
engine = AsyncLLM({str(checkpoint)!r}, num_kvcache_blocks=64, device="cpu")
async def main():
    async for delta in engine.generate("continue", SamplingParams(max_tokens=900, ignore_eos=True)):
        print("begun")
        break
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr
    assert "Traceback" not in done.stderr
