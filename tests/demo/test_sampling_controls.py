"""The controls of the page begin with the checkpoint's own sampling parameters."""

import asyncio
from contextlib import aclosing

import pytest

pytest.importorskip("gradio")

from mmvllm import SamplingParams
from mmvllm.demo.conversation import Options, Turn
from mmvllm.demo.page import build_page
from mmvllm.demo.session import Sessions
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import process_uploads
from mmvllm.entrypoints.async_llm import AsyncLLM
from tests.helpers.models.generation import QWEN2_5_VL, QWEN2_VL, QWEN3_VL, bundled_with
from tests.helpers.serving.pages import elsewhere
from tests.helpers.serving.server import ENGINE

LABELS = ("Temperature", "Top-p", "Top-k, or 0 for all", "Repetition penalty")
GREEDY = (0, 1, 0, 1)


def controls(engine: AsyncLLM, **settings) -> dict[str, dict]:
    """The properties of the page's controls, by label."""
    page = build_page(engine, DemoSettings(**settings))
    parts = page.get_config_file()["components"]
    page.close(verbose=False)
    return {part["props"]["label"]: part["props"] for part in parts if part["props"].get("label")}


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("generation", "want"),
    [
        (QWEN3_VL, (0.7, 0.8, 20, 1)),
        (QWEN2_VL, (0.01, 0.01, 1, 1)),  # top_p 0.001 keeps one token too
        (QWEN2_5_VL, (0, 1, 0, 1.05)),
        ({"do_sample": False, "temperature": 0.7}, GREEDY),
        ({"temperature": 3.5, "top_k": -1}, (3.5, 1, 0, 1)),
        ({"max_new_tokens": 48}, GREEDY),
    ],
    ids=str,
)
def test_controls_begin_with_the_own_values(generation, want, tmp_path):
    engine = AsyncLLM(bundled_with(tmp_path / "model", generation), **ENGINE)
    try:
        found, ignoring = controls(engine), controls(engine, uses_generation_config=False)
    finally:
        asyncio.run(engine.shutdown(drain=False))
    assert tuple(found[label]["value"] for label in LABELS) == want
    assert tuple(ignoring[label]["value"] for label in LABELS) == GREEDY
    for label in LABELS[:2]:
        assert found[label]["minimum"] <= found[label]["value"] <= found[label]["maximum"]
        assert round(found[label]["value"] / found[label]["step"], 6) % 1 == 0


@pytest.mark.slow
@pytest.mark.parametrize("uses_generation_config", [True, False])
def test_an_answer_has_the_values_of_the_controls_and_the_checkpoints_others(uses_generation_config, tmp_path):
    given = []

    async def work() -> None:
        async with AsyncLLM(bundled_with(tmp_path / "model", QWEN3_VL | {"min_p": 0.2}), **ENGINE) as engine:
            inner = engine._engine

            def add(prompt, params, *args, add=inner.add, **keys):
                given.append(params)
                return add(prompt, params, *args, **keys)

            inner.add = add
            settings = DemoSettings(uses_generation_config=uses_generation_config)
            sessions = Sessions(engine, process_uploads(), settings)
            options = Options("", 0.5, 0.9, 7, 1.1, 2, 3, 3136, 20_000)
            async with aclosing(sessions.answer(sessions.get("one"), Turn("Hello"), options)) as ticks:
                async for _ in ticks:
                    pass

    elsewhere(work())
    shown = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.1, "max_tokens": 2, "seed": 3}
    assert given == [SamplingParams(**shown, min_p=0.2 if uses_generation_config else 0.0)]
