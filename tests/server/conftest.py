"""Fixtures: engines with the bundled model, an application and a running server."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from fastapi import FastAPI

from mmvllm.async_llm import AsyncLLM
from tests.helpers.engines import slow_steps
from tests.helpers.generation import bundled_with
from tests.helpers.needs import needs
from tests.helpers.server import ENGINE, Running, make_app, serving


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**ENGINE)
    yield engine
    asyncio.run(engine.shutdown(drain=False))


@pytest.fixture(scope="module")
def engine_without_limit(tmp_path_factory) -> Iterator[AsyncLLM]:
    """With the bundled model, whose own limit of 48 tokens is too short for most calls."""
    engine = AsyncLLM(bundled_with(tmp_path_factory.mktemp("model") / "checkpoint", {"eos_token_id": 461}), **ENGINE)
    yield engine
    asyncio.run(engine.shutdown(drain=False))


@pytest.fixture(scope="module")
def app(engine) -> FastAPI:
    return make_app(engine)


@pytest.fixture(scope="module")
@needs("network")
def running(engine) -> Iterator[Running]:
    with serving(engine) as running:
        yield running


@pytest.fixture(scope="module")
def client(running):
    with running.client() as client:
        yield client


@pytest.fixture
def make_engine() -> Iterator[Callable[..., AsyncLLM]]:
    """Makes slowed engines that a test may break."""
    made = []

    def make(**keys) -> AsyncLLM:
        made.append(slow_steps(AsyncLLM(**ENGINE | keys)))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.shutdown(drain=False))
