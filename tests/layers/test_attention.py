"""Which attention backend serves, why, and how exact the CPU's is."""

import sys

import pytest
import torch

from mmvllm.config import ModelConfig
from mmvllm.kernels import dispatch
from mmvllm.kernels.packed_attention import attention_torch
from mmvllm.layers import attention
from mmvllm.layers.attention import choose_attention
from mmvllm.models.weights import BUNDLED

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig.from_pretrained(BUNDLED)


@pytest.fixture
def gpu(monkeypatch) -> dict[str, bool]:
    """A machine with an H100; what is installed there can be changed."""
    installed = {"flash_attn": True}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: installed.get(name) or None)
    return installed


def test_a_cpu_takes_torch_and_says_why(config):
    backend, reason = choose_attention("auto", config, CPU, torch.float32, None)
    assert backend.name == "torch" and "flash needs a CUDA device, this is cpu" in reason


@pytest.mark.parametrize(
    ("dtype", "block_size", "flash", "chosen", "reason"),
    [
        (torch.bfloat16, None, True, "flash", "the fastest"),
        (torch.bfloat16, 256, True, "flash", "the fastest"),
        (torch.bfloat16, 16, True, "triton", "flash needs kvcache_block_size to be a multiple of 256, it is 16"),
        (torch.float32, None, True, "triton", "flash needs float16 or bfloat16, the model runs in torch.float32"),
        (torch.bfloat16, None, False, "triton", "flash is not installed; pip install 'mmvllm[flash]'"),
    ],
)
def test_a_gpu_takes_the_fastest_that_fits(dtype, block_size, flash, chosen, reason, config, gpu):
    gpu["flash_attn"] = flash
    backend, why = choose_attention("auto", config, CUDA, dtype, block_size)
    assert (backend.name, why) == (chosen, reason)
    assert backend.block_size == (256 if chosen == "flash" else 16)  # what flash-attn can read


def test_torchs_own_kernels_serve_where_they_fit(config, gpu, monkeypatch):
    varlen = dispatch.SimpleNamespace(varlen_attn=lambda q, k, v, block_table=None: None)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)
    for dtype, block_size, wanted in (
        (torch.bfloat16, None, "TorchVarlenAttention"),
        (torch.bfloat16, 512, "TorchVarlenAttention"),
        (torch.bfloat16, 16, "TorchAttention"),
        (torch.float32, None, "TorchAttention"),
    ):
        assert choose_attention("torch", config, CUDA, dtype, block_size)[0].__name__ == wanted
    varlen.varlen_attn = lambda q, k, v: None  # as in torch 2.11
    assert choose_attention("torch", config, CUDA, torch.bfloat16, None)[0].__name__ == "TorchAttention"


def test_without_triton_torch_is_left(config, gpu, monkeypatch):
    gpu["flash_attn"] = False
    monkeypatch.setattr(dispatch, "triton", dispatch.SimpleNamespace(__version__=None))
    backend, why = choose_attention("auto", config, CUDA, torch.bfloat16, None)
    assert backend.name == "torch-varlen" and "triton needs Triton, which is not installed" in why


def test_a_choice_that_cannot_be_had_is_refused(config, gpu, monkeypatch):
    with pytest.raises(ValueError, match="attention_backend is 'flash', which needs a CUDA device"):
        choose_attention("flash", config, CPU, torch.float32, None)
    with pytest.raises(ValueError, match="attention_backend is 'fast', must be 'auto', 'flash', 'triton', 'torch'"):
        choose_attention("fast", config, CPU, torch.float32, None)
    monkeypatch.setattr(dispatch.triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="attention_backend is 'triton', which needs a CUDA device"):
        choose_attention("triton", config, CPU, torch.float32, None)


@pytest.mark.parametrize(
    ("H", "K", "n", "T", "D"), [(16, 16, 256, 256, 80), (4, 4, 1100, 1100, 16), (12, 2, 70, 300, 128)]
)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_bfloat16_on_a_cpu_errs_no_more_than_the_textbook_formula(H, K, n, T, D, scale):
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(heads, rows, D, generator=generator) for heads, rows in ((H, n), (K, T), (K, T)))
    q, k, v = (scale * q).bfloat16(), k.bfloat16(), v.bfloat16()
    causal = n != 256
    future = torch.ones(n, T, dtype=torch.bool).triu(T - n + 1) & causal

    def textbook(q, k, v):
        k, v = (x.repeat_interleave(H // K, dim=0) for x in (k, v))
        scores = (q @ k.transpose(1, 2) * D**-0.5).masked_fill(future, float("-inf"))
        return scores.softmax(dim=-1) @ v

    exact = textbook(q.double(), k.double(), v.double())
    got, plain = ((x.double() - exact) for x in (attention_torch(q, k, v, causal), textbook(q, k, v)))
    assert got.abs().max() <= 1.5 * plain.abs().max()
    assert got.square().mean() <= 1.1 * plain.square().mean()
