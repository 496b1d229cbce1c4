"""A real server on a loopback port, in a thread, over the bundled model."""

import asyncio
from collections.abc import Iterator

import pytest

from mmvllm.async_llm import AsyncLLM
from tests.helpers.server import ENGINE, Running, serving


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**ENGINE)
    yield engine
    asyncio.run(engine.shutdown(drain=False))


@pytest.fixture(scope="module")
def running(engine) -> Iterator[Running]:
    with serving(engine) as running:
        yield running
