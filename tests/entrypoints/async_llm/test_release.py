"""The memory of an engine is freed while it has no requests, and the model is loaded again for the next one."""

import asyncio
import gc
import random
import threading
import weakref
from contextlib import suppress

import pytest

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.errors import EngineStopped, ParameterError, RequestError, RequestFailed
from mmvllm.lora import LoRARequest
from tests.helpers.engine.async_engines import OPTIONS, QUESTION, REQUESTS, SHORT, async_test, collect, reached
from tests.helpers.engine.requests import ask
from tests.helpers.models.adapters import DECODER, make_adapter

SOON = 0.02  # seconds


@pytest.fixture
def make(checkpoint):
    made = []

    def make(release_after=SOON, **keys) -> AsyncLLM:
        made.append(AsyncLLM(checkpoint, release_after=release_after, **OPTIONS | keys))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.shutdown(drain=False))


async def released(engine: AsyncLLM) -> None:
    await reached(lambda: engine.stats().num_released == 1, "released")


@pytest.mark.slow
@async_test
async def test_an_idle_engine_frees_its_memory_and_serves_the_next_request(make):
    engine = make(0.3)
    first = weakref.ref(next(engine._engine.model_runner.model.parameters()))
    kept = make(None)
    expected = [(await collect(kept, *request))[1] for request in REQUESTS]
    for request, answer in zip(REQUESTS, expected, strict=True):
        await released(engine)
        assert engine.health().status == "ok" and engine.health().is_ready
        assert (await collect(engine, *request))[1] == answer
    gc.collect()
    assert first() is None
    assert engine.stats().num_finished == len(REQUESTS) and engine.stats().num_output_tokens > 0
    assert kept.stats().num_released == 0


@pytest.mark.slow
@async_test
async def test_requests_that_race_with_releases_are_all_answered(make):
    await _race(make, number=8, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@async_test
async def test_many_requests_that_race_with_releases_are_all_answered(make, seed):
    await _race(make, number=80, seed=seed)


async def _race(make, number: int, seed: int) -> None:
    """Waves of requests, with pauses about as long as it takes until a release."""
    engine, kept, rng = make(0.005), make(None), random.Random(seed)
    expected = [(await collect(kept, *request))[1] for request in REQUESTS]
    releases = _count_loads(engine)

    async def one(i: int) -> None:
        await asyncio.sleep(rng.uniform(0, 0.02))
        if i % 8 == 7:
            with suppress(TimeoutError):  # it may be complete, where this loop had to wait for the processor
                await asyncio.wait_for(collect(engine, QUESTION, SamplingParams(max_tokens=900, ignore_eos=True)), 0.02)
        else:
            assert (await collect(engine, *REQUESTS[i % len(REQUESTS)]))[1] == expected[i % len(REQUESTS)]

    for _ in range(number):
        await asyncio.gather(*map(one, rng.sample(range(40), rng.randint(1, 8))))
    assert len(releases) > 1
    await released(engine)
    assert engine.stats().num_running == engine.stats().num_waiting == engine.stats().num_used_blocks == 0


def _count_loads(engine: AsyncLLM) -> list[float]:
    held, loads = engine._thread._held, []
    load = held.load

    def counted():
        if held.is_released:
            loads.append(1)
        load()

    held.load = counted
    return loads


@pytest.mark.slow
@async_test
async def test_random_completions_go_on_as_without_a_release(make):
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    engine, kept = make(), make(None)
    expected = [(await collect(kept, ask("Count"), params))[1] for _ in range(3)]
    for answer in expected:
        await released(engine)
        assert (await collect(engine, ask("Count"), params))[1] == answer
    assert expected[0] != expected[1]


@pytest.mark.slow
@async_test
async def test_a_model_that_cannot_be_loaded_again_fails_its_requests_until_it_can(make, monkeypatch):
    engine = make()
    await released(engine)
    with monkeypatch.context() as patch:
        patch.setattr(LLMEngine, "reload", lambda self: exec('raise MemoryError("no room")'))
        with pytest.raises(RequestFailed, match="the released model cannot be loaded again: MemoryError: no room"):
            await collect(engine, QUESTION, SHORT)
        health = engine.health()
        assert health.status == "failing" and "no room" in health.reason and health.is_ready
    await collect(engine, QUESTION, SHORT)
    assert engine.health().status == "ok"


@pytest.mark.slow
@async_test
async def test_shutdown_of_an_engine_that_is_released_or_being_loaded(make, monkeypatch):
    engine, other = make(), make()
    await released(engine)
    await engine.shutdown()
    assert engine.health().status == "stopped"
    await released(other)
    is_loading, may_load, reload = threading.Event(), threading.Event(), LLMEngine.reload

    def slow(self):
        is_loading.set()
        may_load.wait(20)
        return reload(self)

    monkeypatch.setattr(LLMEngine, "reload", slow)
    request = asyncio.create_task(collect(other, QUESTION, SHORT))
    await reached(is_loading.is_set, "loading")
    stopping = asyncio.create_task(other.shutdown(drain=False))
    with pytest.raises(EngineStopped):
        await request
    may_load.set()
    await stopping
    assert other._thread._engine._exited and other.health().status == "stopped"


@pytest.mark.slow
@async_test
async def test_each_of_several_engines_is_released_by_itself(make):
    engine = make(0.5, data_parallel_size=2)
    expected = (await collect(engine, QUESTION, SHORT))[1]
    for _ in range(2):
        await reached(lambda: engine.stats().num_released == 2, "released")
        assert engine.health().status == "ok"
        assert (await collect(engine, QUESTION, SHORT))[1] == expected
        assert engine.stats().num_released < 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@async_test
async def test_requests_with_adapters_use_a_released_engine(make, checkpoint, tmp_path, size):
    adapter = LoRARequest("own", 1, str(make_adapter(tmp_path / "own", checkpoint, target_modules=DECODER)))
    engine = make(0.3, data_parallel_size=size, enable_lora=True)
    requests = [ask("Count the shapes.", lora_request=own) for own in (adapter, None)]
    first, plain = [(await collect(engine, request, SHORT))[1] for request in requests]
    assert first != plain
    for _ in range(2):
        await reached(lambda: engine.stats().num_released == size, "released")
        engine.load_adapter(adapter)
        with pytest.raises(RequestError, match="nowhere is not a LoRA adapter"):
            await collect(engine, ask("x", lora_request=LoRARequest("bad", 1, "/nowhere")), SHORT)
        assert engine.stats().num_released == size
        assert (await collect(engine, requests[0], SHORT))[1] == first


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_wrong_time(checkpoint, seconds):
    with pytest.raises(ParameterError, match=r"release_after must be a number of seconds above 0, or None, got .*"):
        AsyncLLM(checkpoint, release_after=seconds)
