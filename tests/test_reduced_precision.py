"""Packed bfloat16 and int8 weights of every family: completions, and logits as accurate as the number format allows."""

import pytest
import torch

from mmvllm import SamplingParams
from tests.helpers.engines import assert_idle
from tests.helpers.parity import REQUESTS
from tests.helpers.reference import Reference, assert_no_worse, first_logits, round_to_8_bits
from tests.helpers.shapes import IMAGE_SHAPES

EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)
FORMATS = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int8 in bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
}


@pytest.mark.parametrize("shape", IMAGE_SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_request_is_answered(name, shape, checkpoints, make_llm):
    llm = make_llm(checkpoints(shape), **FORMATS[name])
    outputs = llm.generate_multimodal(list(REQUESTS.values()), EIGHT)
    assert [len(output.token_ids) for output in outputs] == [8] * len(REQUESTS)
    assert_idle(llm)


def plain(shape: str, checkpoints, name: str) -> Reference:
    """The model of transformers with the same weights in the same format."""
    hf = Reference(checkpoints(shape), torch.bfloat16 if name == "bfloat16" else torch.float32)
    if name == "int8":
        round_to_8_bits(hf.model)
    return hf


@pytest.mark.parametrize("shape", IMAGE_SHAPES)
@pytest.mark.parametrize("name", ["bfloat16", "int8"])
@pytest.mark.parametrize("question", ["text", "three"])
def test_the_error_of_the_logits_is_at_most_twice_that_of_plain_torch(
    question, name, shape, checkpoints, reference, make_llm
):
    inputs = reference(shape).inputs(REQUESTS[question])
    exact = reference(shape).in_float64(reference(shape).logits, inputs)
    engine = make_llm(checkpoints(shape), **FORMATS[name]).engine
    assert_no_worse(first_logits(engine, inputs), plain(shape, checkpoints, name).logits(inputs), exact)
