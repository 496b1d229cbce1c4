"""Tensors of one quantized layer, and what reading them gives."""

import torch

from mmvllm.quantization.checkpoint_tensors import assembled
from mmvllm.quantization.config import parse_quantization

LAYER = "model.layers.3.mlp.down_proj"
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(layout: str, **weights) -> dict:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


class Stored:
    """A tensor of a file."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index) -> torch.Tensor:
        return self.tensor[index]


def read(tensors: dict, config: dict, num_experts: int = 0) -> dict:
    stored = ((name, Stored(tensor)) for name, tensor in tensors.items())
    return dict(assembled(stored, parse_quantization(config), num_experts))


def weight_of(out: int = 48, columns: int = 96) -> torch.Tensor:
    return torch.randn(out, columns, generator=torch.Generator().manual_seed(out)) * 0.3 + 0.02


def named(packed: dict) -> dict:
    """Tensors of the layer by their names in the checkpoint."""
    return {f"{LAYER}.{name}": tensor for name, tensor in packed.items()}
