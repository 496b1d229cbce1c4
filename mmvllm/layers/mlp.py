"""The gated MLP of the decoder and of some ViTs."""

from torch import Tensor, nn

from mmvllm.kernels.fp8 import Fp8Rows
from mmvllm.layers.batch import AdapterRows
from mmvllm.layers.linear import PaddedLinear, SiluGate, by_rows
from mmvllm.layers.sharding import Shard

_ALIGNMENT = 8  # values: 16 bytes of a 16-bit dtype, the unit in which GPUs load rows of a matrix
_SHARD_ALIGNMENT = 16  # for 8-bit floats; published sizes are multiples of it, but their shards may not be


class GatedMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): x (N, C) -> (silu(x Gᵀ) * (x Uᵀ)) Dᵀ (N, C).

    The inner size I is padded with zeros to a multiple of `_ALIGNMENT`, or of `_SHARD_ALIGNMENT` for a shard. The sum
    of all shards' results is the MLP's result.
    """

    def __init__(self, size: int, intermediate_size: int | Shard, bias: bool = False):
        super().__init__()
        inner = Shard.of(intermediate_size)
        alignment = _ALIGNMENT if inner.length == inner.whole else _SHARD_ALIGNMENT
        padding = -inner.length % alignment or (alignment if inner.length == 0 else 0)
        self.gate_up_proj = SiluGate(size, intermediate_size, bias, padding)
        self.down_proj = PaddedLinear(intermediate_size, size, bias, padding)

    @property
    def is_fp8(self) -> bool:
        return self.gate_up_proj.is_fp8

    def forward(self, x: Tensor | Fp8Rows, adapters: AdapterRows | None = None) -> Tensor:
        return by_rows(lambda rows, own=None: self.down_proj(self.gate_up_proj(rows, own), own), x, adapters)
