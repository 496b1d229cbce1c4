"""RMSNorm, alone and fused with the residual addition before it."""

import torch
from torch import Tensor, nn

from mmvllm.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (N, C) and the residual (N, C), None in the first layer -> their normalised sum, and their sum."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps)
