"""The gated MLP of the decoder, and of some ViTs."""

from torch import Tensor, nn

from mmvllm.kernels.fp8 import Fp8Rows
from mmvllm.layers.linear import PaddedLinear, SiluGate, by_rows

_ALIGNMENT = 8  # values: 16 bytes of a 16-bit dtype, the unit in which GPUs load rows of a matrix


class GatedMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): x (N, C) -> (silu(x Gᵀ) * (x Uᵀ)) Dᵀ (N, C).

    The inner size I is padded with zeros to a multiple of `_ALIGNMENT`.
    """

    def __init__(self, size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        padding = -intermediate_size % _ALIGNMENT
        self.gate_up_proj = SiluGate(size, intermediate_size, bias, padding)
        self.down_proj = PaddedLinear(intermediate_size, size, bias, padding)

    def use_fp8(self) -> None:
        """Replace both weights by weights of 8-bit floats, without values; raises ValueError for their sizes."""
        self.gate_up_proj.use_fp8()
        self.down_proj.use_fp8()

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        return by_rows(lambda rows: self.down_proj(self.gate_up_proj(rows)), x)
