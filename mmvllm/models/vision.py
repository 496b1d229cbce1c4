"""Layers that the families' ViTs share: one call takes packed patches of many images and attends within segments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmvllm.config import VisionConfig
from mmvllm.inputs import Grid
from mmvllm.kernels.quick_gelu import quick_gelu
from mmvllm.kernels.rotary import rotary
from mmvllm.layers.attention import AttentionBackend, Segments
from mmvllm.layers.batch import AdapterRows
from mmvllm.layers.linear import Linear, by_rows
from mmvllm.layers.norm import LayerNorm, RMSNorm
from mmvllm.utils.transfer import to_device

Norm = LayerNorm | RMSNorm

ACTIVATIONS = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """The layout of packed patches, which a ViT takes with their values; created on the host.

    Args:
        tensors: indexes and weights that the ViT defines; their last axes are patches or merged tokens.
        segments: segments of the patches, one division for each kind of attention in the ViT.
        slot: slot of the LoRA adapter that all items use, and the number of slots; None without an adapter.
    """

    tensors: tuple[Tensor, ...]
    segments: tuple[Segments, ...]
    slot: tuple[int, int] | None = None

    def adapters(self, x: Tensor, merged: int = 1) -> AdapterRows | None:
        """Return the adapter rows of layers that take x (P, ...), or its rows in groups of `merged`."""
        return self.slot and AdapterRows.alone(*self.slot, len(x) // merged, x.device)

    def to(self, device: torch.device) -> "PatchLayout":
        tensors = tuple(to_device(tensor, device) for tensor in self.tensors)
        return PatchLayout(tensors, tuple(segments.to(device) for segments in self.segments))


class PatchEmbed(nn.Module):
    """The checkpoint's 3-D convolution as a matrix product, since its stride equals its kernel size."""

    def __init__(self, config: VisionConfig, bias: bool):
        super().__init__()
        self.proj = Linear(config.patch_dim, config.embed_dim, bias=bias)

    def forward(self, patches: Tensor, adapters: AdapterRows | None) -> Tensor:
        return self.proj(patches, adapters)


class VisionAttention(nn.Module):
    """Full attention within each segment, with 2-D rotary positions."""

    def __init__(self, config: VisionConfig, backend: type[AttentionBackend]):
        super().__init__()
        self.num_heads = config.num_heads
        self.backend = backend
        self.qkv = Linear(config.embed_dim, 3 * config.embed_dim)
        self.proj = Linear(config.embed_dim, config.embed_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments, adapters: AdapterRows | None) -> Tensor:
        q, k, v = self.qkv(x, adapters).view(len(x), 3, self.num_heads, -1).unbind(1)  # each (P, H, D)
        q, k = rotary(q, k, cos, sin)
        return self.proj(self.backend.packed(q, k, v, segments).flatten(1), adapters)


class VisionMLP(nn.Module):
    """Two linear layers with the config's activation between them."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        if config.hidden_act not in ACTIVATIONS:
            raise ValueError(f"the ViT's hidden_act is {config.hidden_act!r}; supported: {', '.join(ACTIVATIONS)}")
        self.fc1 = Linear(config.embed_dim, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.embed_dim)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, adapters: AdapterRows | None) -> Tensor:
        return by_rows(lambda rows, own=None: self.fc2(self.act(self.fc1(rows, own)), own), x, adapters)


class VisionBlock(nn.Module):
    """Attention and an MLP with residual connections, each after a norm that `make_norm` creates.

    As in the decoder, a norm first adds the preceding output to the residual, in one kernel on a GPU.
    """

    def __init__(
        self,
        config: VisionConfig,
        backend: type[AttentionBackend],
        make_norm: Callable[[int], Norm],
        mlp: nn.Module,
    ):
        super().__init__()
        self.norm1 = make_norm(config.embed_dim)
        self.norm2 = make_norm(config.embed_dim)
        self.attn = VisionAttention(config, backend)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        segments: Segments,
        adapters: AdapterRows | None,
    ) -> tuple[Tensor, Tensor]:
        """Map the previous block's output and residual, both (P, embed_dim), to this block's output and residual."""
        x, residual = self.norm1.add(x, residual)
        x, residual = self.norm2.add(self.attn(x, cos, sin, segments, adapters), residual)
        return self.mlp(x, adapters), residual


class PatchMerger(nn.Module):
    """Merges each merge_size x merge_size square of patches into one embedding of the decoder's width."""

    def __init__(self, config: VisionConfig, make_norm: Callable[[int], Norm]):
        super().__init__()
        self.width = config.embed_dim * config.spatial_merge_size**2
        self.ln_q = make_norm(config.embed_dim)
        self.mlp = nn.Sequential(Linear(self.width, self.width), nn.GELU(), Linear(self.width, config.out_hidden_size))

    def forward(self, x: Tensor, residual: Tensor, adapters: AdapterRows | None) -> Tensor:
        """Return embeddings (M, C) of the sum of x and the residual, both (P, embed_dim)."""
        first, act, second = self.mlp
        return second(act(first(self.ln_q.add(x, residual)[0].view(-1, self.width), adapters)), adapters)


def frames(grids: Sequence[Grid]) -> Segments:
    """Return one segment per frame, on the host, because patches attend only within their frame."""
    return Segments.of([h * w for t, h, w in grids for _ in range(t)], torch.device("cpu"))
