"""Keyword arguments of the engine and of sampling: typos get suggestions, arguments without effect are accepted."""

import inspect
import pickle
from dataclasses import fields, replace
from pathlib import Path

import pytest

from mmvllm import EngineConfig, SamplingParams, StructuredOutputsParams
from mmvllm.config import ACCEPTED_VLLM_ARGUMENTS as ENGINE_ARGUMENTS
from mmvllm.sampling_params import ACCEPTED_VLLM_ARGUMENTS as SAMPLING_ARGUMENTS
from mmvllm.utils.arguments import check_arguments, check_key

KNOWN, ACCEPTED = ("size", "seed"), {"parallel": (1,), "log": None}


def test_known_arguments_are_returned_and_accepted_ones_dropped():
    assert check_arguments("LLM", {"size": 3, "parallel": 1, "log": "any"}, KNOWN, ACCEPTED) == {"size": 3}


def test_an_unknown_argument_gets_a_suggestion_or_the_known_names():
    with pytest.raises(TypeError, match=r"^LLM has no argument 'sed'; did you mean 'seed'\?$"):
        check_arguments("LLM", {"sed": 1}, KNOWN, ACCEPTED)
    with pytest.raises(TypeError, match=r"^LLM has no argument 'zzz'; known: size, seed$"):
        check_arguments("LLM", {"zzz": 1}, KNOWN, ACCEPTED)


def test_an_accepted_argument_with_another_value_is_not_supported():
    with pytest.raises(ValueError, match=r"^LLM does not support parallel=2; leave it out or give 1$"):
        check_arguments("LLM", {"parallel": 2}, KNOWN, ACCEPTED)


def test_engine_arguments_of_vllm_that_change_nothing_are_accepted():
    given = {name: 4 if accepted is None else accepted[0] for name, accepted in ENGINE_ARGUMENTS.items()}
    assert EngineConfig.from_arguments("LLM", max_num_seqs=3, **given) == EngineConfig(max_num_seqs=3)


def test_a_tokenizer_is_accepted_if_it_is_that_of_the_model():
    for model in ("x/y", Path("x/y")):
        assert EngineConfig.from_arguments("LLM", model, tokenizer="x/y") == EngineConfig()
    assert EngineConfig.from_arguments("LLM", "None") == EngineConfig()
    with pytest.raises(ValueError, match="does not support tokenizer='z'"):
        EngineConfig.from_arguments("LLM", "x/y", tokenizer="z")


def test_dtypes_have_their_names_of_vllm():
    for name, want in (("half", "float16"), ("float", "float32")):
        assert EngineConfig(dtype=name).dtype == want


@pytest.mark.parametrize("name", ["awq", "gptq_marlin", "compressed-tensors"])
def test_the_quantization_of_a_checkpoint_is_not_an_argument(name):
    with pytest.raises(
        ValueError, match=f"quantization is '{name}', but config.json of the checkpoint names it; leave it out"
    ):
        EngineConfig(quantization=name)


def test_structured_outputs_take_arguments_of_vllm_that_change_nothing():
    given = {"disable_any_whitespace": False, "disable_fallback": True, "structural_tag": None}
    assert StructuredOutputsParams(regex="a", **given) == StructuredOutputsParams(regex="a")
    with pytest.raises(ValueError, match="does not support disable_any_whitespace=True"):
        StructuredOutputsParams(json={}, disable_any_whitespace=True)


@pytest.mark.parametrize(("name", "value"), [("pipeline_parallel_size", 2), ("enable_chunked_prefill", False)])
def test_engine_arguments_that_would_change_something_are_refused(name, value):
    with pytest.raises(ValueError, match=f"AsyncLLM does not support {name}={value}"):
        EngineConfig.from_arguments("AsyncLLM", **{name: value})


def test_the_owner_of_engine_arguments_is_named():
    with pytest.raises(TypeError, match=r"^AsyncLLM has no argument 'max_num_seq'; did you mean 'max_num_seqs'"):
        EngineConfig.from_arguments("AsyncLLM", max_num_seq=1)


def test_sampling_arguments_of_vllm_that_change_nothing_are_accepted():
    given = {name: accepted[-1] for name, accepted in SAMPLING_ARGUMENTS.items()}
    assert SamplingParams(max_tokens=3, **given) == SamplingParams(max_tokens=3)


@pytest.mark.parametrize(("name", "value"), [("use_beam_search", True), ("truncate_prompt_tokens", 1)])
def test_sampling_arguments_that_would_change_something_are_refused(name, value):
    with pytest.raises(ValueError, match=f"SamplingParams does not support {name}="):
        SamplingParams(**{name: value})


def test_a_sampling_argument_may_have_its_name_of_vllm():
    assert SamplingParams(structured_outputs={"regex": "a"}) == SamplingParams(structured={"regex": "a"})
    with pytest.raises(TypeError, match="SamplingParams has 'structured_outputs' and 'structured', which are the same"):
        SamplingParams(structured_outputs=None, structured={"regex": "a"})


def test_an_unknown_sampling_argument_gets_a_suggestion():
    with pytest.raises(TypeError, match="SamplingParams has no argument 'max_token'; did you mean 'max_tokens'"):
        SamplingParams(max_token=5)


def test_the_signature_of_sampling_params_lists_its_fields_and_copies_are_equal():
    assert list(inspect.signature(SamplingParams).parameters) == [field.name for field in fields(SamplingParams)]
    params = SamplingParams(n=2, stop="a", detokenize=True)
    assert pickle.loads(pickle.dumps(params)) == replace(params, n=2) == params


@pytest.mark.parametrize("key", ["", " \n", "sekrit\u00e4", "sek\nrit", "sekrit\0", "sek\x1brit", "\ud800sekrit"])
def test_a_key_that_is_empty_or_no_header_value_is_refused_without_showing_it(key):
    with pytest.raises(ValueError, match=r"^--api-key (is empty|must be a key of printable ASCII)") as raised:
        check_key("--api-key", key)
    assert "sek" not in str(raised.value)


def test_white_space_around_a_key_is_left_out():
    assert check_key("--api-key", "\r\n\t a key \u2003\n") == "a key"
