"""RMSNorm and LayerNorm, alone and fused with the residual addition before them."""

import torch
from torch import Tensor, nn

from mmvllm.kernels.fp8 import Fp8Rows, quantize_rows
from mmvllm.kernels.layer_norm import add_layer_norm
from mmvllm.kernels.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square normalization, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normalized sum of x and residual, both (N, C), and the sum; the first layer has no residual."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps)

    def add_fp8(self, x: Tensor, residual: Tensor | None) -> tuple[Fp8Rows, Tensor]:
        """Do the same as `add`, with the normalized sum quantized to 8 bits."""
        if residual is None:
            return quantize_rows(self(x)), x
        return add_rms_norm_fp8(x, residual, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """Normalization by mean and variance (arXiv 1607.06450)."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__(size, eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `RMSNorm.add`."""
        if residual is None:
            return self(x), x
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)
