"""The Qwen3-VL vision transformer (arXiv 2511.21631) with interpolated learned positions and DeepStack."""

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor, nn

from mmvllm.inputs import Grid
from mmvllm.layers.attention import AttentionBackend
from mmvllm.layers.batch import AdapterRows
from mmvllm.layers.linear import Linear
from mmvllm.layers.norm import LayerNorm
from mmvllm.models.qwen3_vl.config import Qwen3VLVisionConfig
from mmvllm.models.rotary import vision_cos_sin, vision_positions
from mmvllm.models.vision import PatchEmbed, PatchLayout, VisionBlock, VisionMLP, frames


class Qwen3VLPatchMerger(nn.Module):
    """Merges each merge_size x merge_size square of patches into one embedding; norm before or (DeepStack) after."""

    def __init__(self, config: Qwen3VLVisionConfig, norm_after: bool):
        super().__init__()
        self.width = config.embed_dim * config.spatial_merge_size**2
        self.norm_width = self.width if norm_after else config.embed_dim
        self.norm = LayerNorm(self.norm_width)
        self.fc1 = Linear(self.width, self.width)
        self.fc2 = Linear(self.width, config.out_hidden_size)
        self.act = nn.GELU()

    def forward(self, x: Tensor, adapters: AdapterRows | None) -> Tensor:
        x = self.norm(x.view(-1, self.norm_width)).view(-1, self.width)  # (P, embed_dim) -> (M, width)
        return self.fc2(self.act(self.fc1(x, adapters)), adapters)  # (M, C)


class PositionEmbedding(nn.Embedding):
    """Learned embeddings of a square grid of positions, interpolated bilinearly to the grid of an image."""

    def taps(self, grids: Sequence[Grid], merge_size: int) -> tuple[Tensor, Tensor]:
        """Return the arguments of `forward` for the packed patches of the images, in merge order; on the host."""
        taps = [_taps(grid, merge_size, isqrt(self.num_embeddings)) for grid in grids]
        indexes, weights = (torch.cat(parts, dim=1) for parts in zip(*taps, strict=True))
        return indexes, weights

    def forward(self, indexes: Tensor, weights: Tensor) -> Tensor:
        """Sum the learned embeddings at `indexes` (4, P) with `weights` (4, P) in float32; return (P, embed_dim)."""
        return sum(self.weight[at] * w[:, None] for at, w in zip(indexes, weights, strict=True)).to(self.weight.dtype)


class Qwen3VLVisionTransformer(nn.Module):
    """Encodes all images of a step in one call."""

    def __init__(self, config: Qwen3VLVisionConfig, backend: type[AttentionBackend]):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, bias=True)
        self.pos_embed = PositionEmbedding(config.num_position_embeddings, config.embed_dim)
        self.blocks = nn.ModuleList(
            VisionBlock(config, backend, LayerNorm, VisionMLP(config)) for _ in range(config.depth)
        )
        self.merger = Qwen3VLPatchMerger(config, norm_after=False)
        self.deepstack_merger_list = nn.ModuleList(
            Qwen3VLPatchMerger(config, norm_after=True) for _ in config.deepstack_visual_indexes
        )

    def layout(self, grids: Sequence[Grid]) -> PatchLayout:
        """Return positions (2, P), and the learned positions around each with weights (4, P); segments: frames."""
        merge_size = self.config.spatial_merge_size
        taps = self.pos_embed.taps(grids, merge_size)
        return PatchLayout((vision_positions(grids, merge_size), *taps), (frames(grids),))

    def forward(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        """Encode packed, normalized patches (P, patch_dim) as embeddings (M, mm_embed_size).

        An embedding concatenates the merged outputs of the last block and of the blocks in `deepstack_visual_indexes`.
        """
        c, (positions, *taps), (segments,) = self.config, layout.tensors, layout.segments
        cos, sin = vision_cos_sin(positions, c.head_dim)
        adapters, merged = layout.adapters(patches), layout.adapters(patches, c.spatial_merge_size**2)
        x = self.patch_embed(patches, adapters) + self.pos_embed(*taps)  # (P, embed_dim)
        mergers = dict(zip(c.deepstack_visual_indexes, self.deepstack_merger_list, strict=True))
        residual, deepstack = None, []
        for i, block in enumerate(self.blocks):
            x, residual = block(x, residual, cos, sin, segments, adapters)
            if i in mergers:
                x, residual = residual + x, None
                deepstack.append(mergers[i](x, merged))
        x = x if residual is None else residual + x
        return torch.cat([self.merger(x, merged), *deepstack], dim=1)


@lru_cache(maxsize=256)
def _taps(grid: Grid, merge_size: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the four learned positions around each patch, in merge order, and their weights (float32), each (4, P).

    They are on the CPU. The image's grid is stretched over the learned grid such that the corners coincide.
    """
    rows, columns = vision_positions([grid], merge_size)
    (top, bottom, down), (left, right, across) = _neighbors(rows, grid[1], side), _neighbors(columns, grid[2], side)
    indexes = torch.stack([top * side + left, top * side + right, bottom * side + left, bottom * side + right])
    weights = [(1 - down) * (1 - across), (1 - down) * across, down * (1 - across), down * across]
    return indexes, torch.stack(weights)


def _neighbors(at: Tensor, size: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the learned positions before and after patches `at` of `size` along an axis, and the fraction between."""
    position = at.float() * (side - 1) / max(size - 1, 1)
    before = position.floor()
    return before.long(), (before.long() + 1).clamp(max=side - 1), position - before
