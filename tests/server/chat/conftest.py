"""Chats whose completions may be long."""

import pytest

from mmvllm.entrypoints.async_llm import AsyncLLM


@pytest.fixture(scope="module")
def engine(engine_without_limit) -> AsyncLLM:
    return engine_without_limit
