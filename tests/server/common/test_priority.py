"""Requests have a priority where the server allows it; otherwise they are served in the order of their arrival."""

from collections.abc import Mapping

import pytest

from mmvllm.entrypoints.async_llm import AsyncLLM
from tests.helpers.serving.server import CHAT, COMPLETIONS, EMBEDDINGS, answered, chat, completion, make_app
from tests.server.refusals import check_refusal, refusal

BODIES = {
    CHAT: chat("Hello", max_tokens=1),
    COMPLETIONS: completion(prompt=["Hello", "World"], max_tokens=1),
    EMBEDDINGS: {"model": "bundled", "input": ["Hello", "World"]},
    "/v1/responses": {"model": "bundled", "input": "Hello", "max_output_tokens": 1},
}


@pytest.fixture
def priorities(engine, monkeypatch) -> list[int]:
    """The priorities of the requests that the engine is given."""
    given, generate = [], AsyncLLM.generate

    async def noting(self, request, *args, **keys):
        made = request if isinstance(request, str | list | Mapping) else await request()
        given.append(made.get("priority", 0) if isinstance(made, Mapping) else 0)
        async for delta in generate(self, made, *args, **keys):
            yield delta

    monkeypatch.setattr(AsyncLLM, "generate", noting)
    return given


@pytest.mark.parametrize(("path", "body"), BODIES.items(), ids=BODIES)
@pytest.mark.parametrize("priority", [None, 0, 1, -7, 2**62])
def test_a_request_has_its_priority(path, body, priority, engine, priorities):
    app = make_app(engine, scheduling_policy="priority")
    answered(app, path, body | {"priority": priority})
    assert set(priorities) == {priority or 0}


@pytest.mark.parametrize(("path", "body"), BODIES.items(), ids=BODIES)
def test_a_priority_is_refused_by_other_servers(path, body, engine, priorities):
    app = make_app(engine)
    answered(app, path, body | {"priority": 0})
    words = "priority must be 0 unless the server has --scheduling-policy priority, got 3"
    check_refusal(app, path, body | {"priority": 3}, "priority", words)
    assert set(priorities) == {0}


@pytest.mark.parametrize("value", [2**63, 1.5, True])
def test_a_priority_is_an_integer_of_64_bits(value, engine):
    app = make_app(engine, scheduling_policy="priority")
    assert refusal(app, CHAT, chat("Hello", priority=value))["param"] == "priority"
