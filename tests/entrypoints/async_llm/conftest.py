"""Engines whose steps are slow enough to observe a request in flight."""

import asyncio

import pytest

from mmvllm import AsyncLLM
from tests.helpers.engine.async_engines import OPTIONS, wait_until_idle
from tests.helpers.engine.engines import slow_steps


@pytest.fixture(scope="module")
def shared_engine(checkpoint):
    engine = slow_steps(AsyncLLM(checkpoint, **OPTIONS, max_num_seqs=4, max_waiting=8))
    yield engine
    asyncio.run(engine.shutdown())


@pytest.fixture
def engine(shared_engine):
    """The module's engine, which must be idle after each test."""
    yield shared_engine
    wait_until_idle(shared_engine)


@pytest.fixture
def make_engine(checkpoint):
    """AsyncLLM(...) that is shut down after the test."""
    made = []

    def make(**engine_args) -> AsyncLLM:
        made.append(slow_steps(AsyncLLM(checkpoint, **OPTIONS | engine_args)))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.shutdown(drain=False))
