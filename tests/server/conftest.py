"""Fixtures: engines with the bundled model, an application and a running server."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from fastapi import FastAPI

from mmvllm import LLM
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.outputs import CompletionOutput, Delta, RequestOutput
from tests.helpers.engine.engines import slow_steps
from tests.helpers.models.generation import bundled_with
from tests.helpers.needs import needs
from tests.helpers.serving.server import ENGINE, Running, make_app, serving


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
def bundled_llm() -> Iterator[LLM]:
    """What responses of the server are compared with."""
    with LLM(**ENGINE) as llm:
        yield llm


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


@pytest.fixture
def writes(engine, monkeypatch):
    """Has the engine write given texts, one for each completion, in pieces of three characters."""

    def writes(*texts: str, finish_reason: str = "eos") -> None:
        async def generate(request, params, **_):
            assert len(texts) == params.n
            request = await request()
            for i, text in enumerate(texts):
                pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
                for piece in pieces:
                    yield Delta("a", i, piece, [1])
                output = RequestOutput("a", [CompletionOutput(text, [1] * len(pieces), finish_reason)])
                is_last = i == len(texts) - 1
                yield Delta("a", i, "", [2], finish_reason=finish_reason, output=output if is_last else None)

        monkeypatch.setattr(engine, "generate", generate)

    return writes
