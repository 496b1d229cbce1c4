"""The checkpoint's own sampling parameters, in Python."""

import asyncio

import pytest

from mmvllm import AsyncLLM, LLMEngine, SamplingParams
from tests.helpers.engine.requests import ask
from tests.helpers.models.generation import QWEN2_5_VL, QWEN3_VL, bundled_with
from tests.helpers.serving.server import ENGINE

QUESTION = ask("Describe this image.")
OWN = {name: value for name, value in QWEN3_VL.items() if name != "do_sample"}


@pytest.fixture
def llm_with(make_llm, tmp_path):
    """An LLM whose checkpoint has this generation_config.json."""
    return lambda generation: make_llm(bundled_with(tmp_path / "model", generation))


def tokens(llm, params) -> list[int]:
    return llm.generate_multimodal([QUESTION], params, use_tqdm=False)[0].token_ids


@pytest.mark.slow
def test_the_own_values_are_over_the_defaults(llm_with):
    llm = llm_with(QWEN3_VL)
    assert llm.default_sampling_params() == SamplingParams(**OWN)
    assert llm.engine.default_sampling_params(max_tokens=5, top_k=0) == SamplingParams(
        **OWN | {"max_tokens": 5, "top_k": 0}
    )
    assert llm.default_sampling_params(temperature=0) == SamplingParams(**OWN | {"temperature": 0})


def test_changes_are_checked(llm_with):
    llm = llm_with(QWEN3_VL)
    with pytest.raises(ValueError, match=r"top_p must be a number.*, got 2"):
        llm.default_sampling_params(top_p=2)
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        llm.default_sampling_params(temprature=1)


@pytest.mark.slow
def test_no_parameters_are_greedy_as_before(llm_with):
    llm = llm_with(QWEN3_VL | {"temperature": 5.0, "top_k": 0, "top_p": 1.0})
    greedy = tokens(llm, SamplingParams())
    assert tokens(llm, None) == tokens(llm, {}) == greedy
    assert {*map(tuple, (tokens(llm, llm.default_sampling_params(seed=seed)) for seed in range(3)))} != {tuple(greedy)}


def test_a_temperature_of_a_millionth_is_greedy(llm_with):
    llm = llm_with(QWEN2_5_VL)
    own = llm.default_sampling_params(max_tokens=24, ignore_eos=True)
    assert own.temperature == 1e-6
    assert tokens(llm, own) == tokens(llm, SamplingParams(repetition_penalty=1.05, max_tokens=24, ignore_eos=True))


def test_do_sample_false_is_greedy(llm_with):
    llm = llm_with({"do_sample": False, "temperature": 1.5})
    assert llm.default_sampling_params() == SamplingParams()


def test_async_llm_and_the_engine_have_the_same(tmp_path):
    async def defaults(folder) -> SamplingParams:
        async with AsyncLLM(folder, **ENGINE) as engine:
            assert engine.sampling_defaults == OWN
            return engine.default_sampling_params(max_tokens=9)

    folder = bundled_with(tmp_path / "model", QWEN3_VL)
    assert asyncio.run(defaults(folder)) == SamplingParams(**OWN, max_tokens=9)
    engine = LLMEngine(folder, **ENGINE)
    assert engine.default_sampling_params() == SamplingParams(**OWN)
    engine.exit()


def test_a_damaged_file_is_refused_when_the_model_is_loaded(tmp_path, make_llm):
    with pytest.raises(ValueError, match=r"generation_config\.json's top_p must be .*, got 'x'"):
        make_llm(bundled_with(tmp_path / "model", {"top_p": "x"}))
