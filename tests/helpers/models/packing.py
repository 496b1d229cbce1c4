"""Convert the weights of layers and models, as an engine does while it loads them."""

import torch
from torch import nn

from mmvllm.layers.linear import ConvertedModule
from mmvllm.models.quant_methods import check_quantization, choose_forms

CPU = torch.device("cpu")


def pack_weights(model: nn.Module, dtype: torch.dtype, quantization: str | None = None) -> None:
    """In the forms that `choose_forms` chooses on a CPU; those of a decoder, if `model` is in "decoder.layers"."""
    check_quantization(quantization, CPU, dtype)
    choose_forms(model, CPU, dtype, quantization)
    for module in model.modules():
        if isinstance(module, ConvertedModule):
            module.convert()
