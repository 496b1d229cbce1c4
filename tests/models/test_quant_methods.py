"""The forms that weights of quantized checkpoints take on GPUs, on the meta device."""

import json

import pytest
import torch

from mmvllm.layers.attention import TorchAttention
from mmvllm.layers.linear import LinearMethodModule
from mmvllm.models import quant_methods
from mmvllm.models.registry import family_of, load_config
from mmvllm.quantization.fp8 import Fp8Linear
from mmvllm.quantization.wna16 import W4A16Linear, WNA16Linear
from tests.helpers.models.quantized_checkpoints import FORMATS

CUDA = torch.device("cuda")
AMPERE, ADA = (8, 0), (8, 9)
CODES = {
    **dict.fromkeys(["awq", "gptq-int4", "w4a16", "w4a16-zeros"], (W4A16Linear, W4A16Linear)),
    **dict.fromkeys(["gptq-int8", "w8a8"], (WNA16Linear, WNA16Linear)),
    "fp8": (None, None),  # blocks of 16 columns, fewer than the kernel multiplies at a time
    "fp8-dynamic": (None, Fp8Linear),
}


@pytest.fixture
def forms_of(checkpoints, tmp_path, monkeypatch):
    """A function: shape, format of the checkpoint, compute capability, dtype -> forms by the names of layers."""

    def call(shape, method, capability, dtype=torch.bfloat16, quantization=None):
        monkeypatch.setattr(quant_methods, "supports_fp8", lambda device: capability >= ADA)
        is_fp8 = capability >= ADA and dtype == torch.bfloat16
        monkeypatch.setattr(
            quant_methods, "fp8_unusable", lambda device, dtype: None if is_fp8 else "needs another GPU"
        )
        raw = json.loads((checkpoints(shape) / "config.json").read_text())
        added = {} if method is None else {"quantization_config": FORMATS[method].config(32)}
        (tmp_path / "config.json").write_text(json.dumps(raw | added))
        config = load_config(tmp_path)
        with torch.device("meta"):
            model = family_of(config.architecture).build(config, TorchAttention).to(dtype)
        quant_methods.choose_linear_methods(model, CUDA, dtype, quantization)
        if method is not None:
            quant_methods.keep_quantized(model, CUDA, dtype)
        return {
            name: module.linear_method_cls
            for name, module in model.named_modules()
            if isinstance(module, LinearMethodModule)
        }

    return call


@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("capability", [AMPERE, ADA])
def test_the_decoder_keeps_codes_that_the_gpu_multiplies(method, capability, forms_of):
    chosen = forms_of("gqa2-tied", method, capability)
    assert {form for name, form in chosen.items() if name.startswith("decoder")} == {CODES[method][capability == ADA]}
    assert {form for name, form in chosen.items() if not name.startswith("decoder")} == {None}


def test_float32_is_dequantized(forms_of):
    assert set(forms_of("gqa2-tied", "awq", ADA, torch.float32).values()) == {None}


def test_8_bit_floats_need_bfloat16_for_their_own_products(forms_of):
    chosen = forms_of("gqa2-tied", "fp8-dynamic", ADA, torch.float16)
    assert {form for name, form in chosen.items() if name.startswith("decoder")} == {WNA16Linear}


def test_layers_beside_experts_round_no_inputs(forms_of):
    """The norm before the experts would otherwise give them rounded inputs."""
    chosen = forms_of("experts8-top3", "fp8-dynamic", ADA)
    assert Fp8Linear not in chosen.values() and WNA16Linear in chosen.values()


def test_4_bits_on_the_fly(forms_of):
    chosen = forms_of("experts8-top3", None, AMPERE, quantization="int4")
    linear = {form for name, form in chosen.items() if name.startswith("decoder") and "experts" not in name}
    assert linear == {W4A16Linear}
    assert {form for name, form in chosen.items() if "experts" in name or not name.startswith("decoder")} == {None}
