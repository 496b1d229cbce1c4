"""The whole engine on the Triton kernels, in the interpreter: the same tokens as with their torch references."""

import sys
from dataclasses import replace

import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.kernels import (
    argmax,
    fp8,
    grouped_linear,
    layer_norm,
    penalties,
    quick_gelu,
    rms_norm,
    rotary,
    sampling,
    silu_mul,
    splice,
    write_kv,
)
from mmvllm.layers import experts
from tests.helpers.engine.engines import run_at_once
from tests.helpers.engine.requests import ask, frames, noise_image
from tests.helpers.models.kernels import round_to_e4m3_exactly
from tests.helpers.models.shapes import RICHEST

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the gpu tests run the kernels natively")

REQUESTS = [
    ask(noise_image(60, 80, 1), "Count."),
    ask("Is ", noise_image(90, 57, 2), " like ", noise_image(60, 80, 1), "?"),
    ask(frames(2, 56, 56), "Hello."),
]
ALWAYS = {"rotary", "rotary_write_kv", "rms_norm", "add_rms_norm", "silu_mul", "splice", "sample", "argmax"}
PENALTIES = {"penalize", "count_tokens"}
ALSO = {
    "gqa2-tied": {"quick_gelu", "add_layer_norm"},
    "windows4-tied": set(),
    "deepstack3-tied": {"splice_add", "add_layer_norm"},
    "experts8-top3": {"splice_add", "grouped_linear", "add_layer_norm"},
}


@pytest.fixture
def interpreted(monkeypatch) -> set[str]:
    """Run the Triton kernels on CPU tensors; returns the names of the kernels that ran."""
    ran = set()

    def runs_triton(x: torch.Tensor) -> bool:
        ran.add(sys._getframe(1).f_code.co_name)
        return True

    sampler = (argmax, penalties, sampling)
    modules = (*sampler, experts, fp8, grouped_linear, layer_norm, rotary, quick_gelu, rms_norm, silu_mul, splice)
    for module in (*modules, write_kv):
        monkeypatch.setattr(module, "runs_triton", runs_triton)
    return ran


# One request of one shape; the slow tests have all.
CASES = [(4096, RICHEST[0], 3), *((13, shape, 3) for shape in RICHEST)]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "shape", "number"), [(4096, RICHEST[0], 1), *SLOW], ids=str)
def test_same_tokens_as_with_the_references(budget, shape, number, checkpoints, make_llm, request):
    requests = REQUESTS[:number]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    drawn = replace(params, max_tokens=3, temperature=0.8, top_k=50, top_p=0.9, seed=3, presence_penalty=1.5)
    options = {"kvcache_block_size": 4, "max_num_batched_tokens": budget}
    plain = make_llm(checkpoints(shape), **options)
    want = run_at_once(plain, requests, params), run_at_once(plain, requests, drawn)
    ran = request.getfixturevalue("interpreted")
    llm = make_llm(checkpoints(shape), attention_backend="triton", **options)
    assert llm.engine.attention.name == "triton"
    assert (run_at_once(llm, requests, params), run_at_once(llm, requests, drawn)) == want
    assert ran >= ALWAYS | PENALTIES | ALSO[shape]


@pytest.mark.slow
def test_same_tokens_in_8_bit_floats(checkpoints, make_llm, monkeypatch, request):
    """The products are the reference's, because only GPUs have others."""
    round_to_e4m3_exactly(monkeypatch)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    options = {"kvcache_block_size": 4, "quantization": "fp8"}
    want = run_at_once(make_llm(checkpoints(RICHEST[0]), **options), REQUESTS, params)
    ran = request.getfixturevalue("interpreted")
    llm = make_llm(checkpoints(RICHEST[0]), attention_backend="triton", **options)
    assert run_at_once(llm, REQUESTS, params) == want
    assert ran >= {"rms_norm", "quantize_rows", "add_rms_norm_fp8", "silu_mul_fp8"}
