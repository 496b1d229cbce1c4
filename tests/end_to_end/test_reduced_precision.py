"""Bfloat16, int8 and fp8 weights of every family: completions, and logits as accurate as the number format allows."""

import pytest
import torch

from mmvllm import SamplingParams
from tests.helpers.cpu import NEEDS_8_BITS, kinds
from tests.helpers.engine.engines import assert_idle
from tests.helpers.models.parity import REQUESTS, VIDEOS
from tests.helpers.models.reference import (
    EightBitFloats,
    EightBits,
    ExpertsOf,
    FourBits,
    Reference,
    assert_no_worse,
    first_logits,
)
from tests.helpers.models.shapes import IMAGE_SHAPES, RICHEST, SHAPES

pytestmark = pytest.mark.thinned

EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)
FORMATS = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int8 in bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
FP8 = {"dtype": "float32", "quantization": "fp8"}
# Without experts, and without the hidden size of 56 that GPUs do not multiply in 8 bits.
FP8_SHAPES = [name for name in IMAGE_SHAPES if "experts" not in name and SHAPES[name]["text"].get("hidden_size") != 56]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("shape", IMAGE_SHAPES)
@pytest.mark.parametrize("name", kinds(FORMATS))
def test_every_request_is_answered(name, shape, checkpoints, make_llm):
    llm = make_llm(checkpoints(shape), **FORMATS[name])
    outputs = llm.generate_multimodal(list(REQUESTS.values()), EIGHT)
    assert [len(output.token_ids) for output in outputs] == [8] * len(REQUESTS)
    assert_idle(llm)


def plain_logits(name: str, hf: Reference, folder, inputs: dict) -> torch.Tensor:
    """Logits of transformers' model with the same weights in the same format."""
    if name == "bfloat16":
        return Reference(folder, torch.bfloat16).logits(inputs)
    with EightBits(hf.model):
        return hf.logits(inputs)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("shape", IMAGE_SHAPES)
@pytest.mark.parametrize("name", kinds(["bfloat16", "int8"]))
@pytest.mark.parametrize("question", ["text", "three"])
def test_the_error_of_the_logits_is_at_most_twice_that_of_plain_torch(
    question, name, shape, checkpoints, reference, make_llm
):
    hf, folder = reference(shape), checkpoints(shape)
    inputs = hf.inputs(REQUESTS[question])
    got = first_logits(make_llm(folder, **FORMATS[name]).engine, inputs)
    assert_no_worse(got, plain_logits(name, hf, folder, inputs), hf.in_float64(hf.logits, inputs))


@pytest.mark.spawns
@pytest.mark.slow
@pytest.mark.parametrize("shape", RICHEST)
@pytest.mark.parametrize("name", kinds(["bfloat16", "int8"]))
def test_the_error_of_the_logits_after_clips(name, shape, checkpoints, reference, make_llm):
    hf, folder = reference(shape), checkpoints(shape)
    inputs = hf.inputs(VIDEOS["one clip"])
    got = first_logits(make_llm(folder, **FORMATS[name]).engine, inputs)
    assert_no_worse(got, plain_logits(name, hf, folder, inputs), hf.in_float64(hf.logits, inputs))


@pytest.mark.spawns
@pytest.mark.parametrize("shape", RICHEST)
@pytest.mark.parametrize("name", kinds(["bfloat16", "int8"]))
def test_the_error_of_the_logits_after_clips_where_routers_choose_the_same_experts(
    name, shape, checkpoints, reference, make_llm
):
    hf, folder = reference(shape), checkpoints(shape)
    inputs = hf.inputs(VIDEOS["two clips"])
    with ExpertsOf() as exactly:
        exact = hf.in_float64(hf.logits, inputs)
    with ExpertsOf(exactly.chosen):
        plain = plain_logits(name, hf, folder, inputs)
    with ExpertsOf(exactly.chosen) as own:
        got = first_logits(make_llm(folder, **FORMATS[name]).engine, inputs)
    assert len(own.chosen) == len(exactly.chosen) == {"experts8-top3": 3}.get(shape, 0)
    assert_no_worse(got, plain, exact)


@NEEDS_8_BITS
@pytest.mark.thinned(2)
@pytest.mark.parametrize("shape", [name for name in IMAGE_SHAPES if "experts" not in name])
@pytest.mark.parametrize("question", ["text", "three"])
def test_the_error_of_logits_with_weights_in_4_bits(question, shape, checkpoints, reference, make_llm):
    """Compared with the same rounding in transformers' model, in bfloat16."""
    hf, folder = reference(shape), checkpoints(shape)
    inputs, plain = hf.inputs(REQUESTS[question]), Reference(folder, torch.bfloat16)
    with FourBits(plain.model):
        rounded = plain.logits(inputs)
    got = first_logits(make_llm(folder, **FORMATS["int4"]).engine, inputs)
    assert_no_worse(got, rounded, hf.in_float64(hf.logits, inputs))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("shape", FP8_SHAPES)
@pytest.mark.parametrize("question", ["text", "three"])
def test_the_error_of_logits_with_8_bit_floats(question, shape, checkpoints, reference, make_llm):
    """The reference that runs on a CPU, compared with the same rounding in transformers' model."""
    hf = reference(shape)
    inputs = hf.inputs(REQUESTS[question])
    with EightBitFloats(hf.model):
        plain = hf.logits(inputs)
    got = first_logits(make_llm(checkpoints(shape), **FP8).engine, inputs)
    assert_no_worse(got, plain, hf.in_float64(hf.logits, inputs))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", FP8_SHAPES)
def test_every_request_is_answered_with_8_bit_floats(shape, dtype, checkpoints, make_llm):
    llm = make_llm(checkpoints(shape), dtype=dtype, quantization="fp8")
    outputs = llm.generate_multimodal(list(REQUESTS.values()), EIGHT)
    assert [len(output.token_ids) for output in outputs] == [8] * len(REQUESTS)
    assert_idle(llm)
