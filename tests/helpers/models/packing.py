"""Convert the weights of layers and models, as an engine does while it loads them."""

import torch
from torch import nn

from mmvllm.layers.linear import LinearMethodModule
from mmvllm.models.quant_methods import check_quantization, choose_linear_methods

CPU = torch.device("cpu")


def pack_weights(model: nn.Module, dtype: torch.dtype, quantization: str | None = None) -> None:
    """Process weights as `choose_linear_methods` says on a CPU; as a decoder's, if `model` is in "decoder.layers"."""
    check_quantization(quantization, CPU, dtype)
    choose_linear_methods(model, CPU, dtype, quantization)
    for module in model.modules():
        if isinstance(module, LinearMethodModule):
            module.process_weights_after_loading()
