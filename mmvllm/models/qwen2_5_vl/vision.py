"""The Qwen2.5-VL vision transformer (arXiv 2502.13923): window attention in most blocks, RMSNorm and SwiGLU.

Before the first block, merged tokens (merge_size x merge_size patches each) are reordered window by window, which makes
each window a contiguous run of patches. After the merger, the original order is restored.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from mmvllm.inputs import Grid
from mmvllm.layers.attention import AttentionBackend, Segments
from mmvllm.layers.mlp import GatedMLP
from mmvllm.layers.norm import RMSNorm
from mmvllm.models.qwen2_5_vl.config import Qwen25VLVisionConfig
from mmvllm.models.rotary import vision_cos_sin, vision_positions
from mmvllm.models.vision import PatchEmbed, PatchLayout, PatchMerger, VisionBlock, frames

Norm = partial(RMSNorm, eps=1e-6)


class Qwen25VLVisionTransformer(nn.Module):
    """Encodes all images of a step in one call; the blocks in `fullatt_block_indexes` have no windows."""

    def __init__(self, config: Qwen25VLVisionConfig, backend: type[AttentionBackend]):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, bias=False)
        self.blocks = nn.ModuleList(
            VisionBlock(config, backend, Norm, GatedMLP(config.embed_dim, config.intermediate_size, bias=True))
            for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, Norm)

    def layout(self, grids: Sequence[Grid]) -> PatchLayout:
        """Return positions (2, P), patches in window order (P,), the inverse order (M,); segments: frames, windows."""
        c, merge_size = self.config, self.config.spatial_merge_size
        order, window_lens = window_order(grids, merge_size, c.window_rows)
        patch_order = (order[:, None] * merge_size**2 + torch.arange(merge_size**2)).flatten()
        positions = vision_positions(grids, merge_size)[:, patch_order]
        windows = Segments.of(window_lens, order.device, (c.window_rows * merge_size) ** 2)
        return PatchLayout((positions, patch_order, order.argsort()), (frames(grids), windows))

    def forward(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        """Encode packed, normalized patches (P, patch_dim) as embeddings (M, C)."""
        c, (positions, patch_order, places), (whole, windows) = self.config, layout.tensors, layout.segments
        cos, sin = vision_cos_sin(positions, c.head_dim)
        adapters = layout.adapters(patches)  # all patches use one adapter, so their order does not matter
        x, residual = self.patch_embed(patches, adapters)[patch_order], None  # (P, embed_dim)
        for i, block in enumerate(self.blocks):
            segments = whole if i in c.fullatt_block_indexes else windows
            x, residual = block(x, residual, cos, sin, segments, adapters)
        return self.merger(x, residual, layout.adapters(x, c.spatial_merge_size**2))[places]


def window_order(grids: Sequence[Grid], merge_size: int, window_rows: int) -> tuple[Tensor, list[int]]:
    """Return the merged tokens of all images (M,), window by window, and the number of patches in each window."""
    orders, lens, first = [], [], 0
    for grid in grids:
        order, windows = _order_of_image(grid, merge_size, window_rows)
        orders.append(order + first)
        lens += windows
        first += len(order)
    return torch.cat(orders), lens


@lru_cache(maxsize=256)
def _order_of_image(grid: Grid, merge_size: int, window_rows: int) -> tuple[Tensor, tuple[int, ...]]:
    """Order windows row by row in a frame, and tokens row by row in a window; windows at the edges may be smaller."""
    t, rows, columns = grid[0], grid[1] // merge_size, grid[2] // merge_size
    frame = torch.arange(rows * columns).view(rows, columns)
    windows = [window.flatten() for band in frame.split(window_rows) for window in band.split(window_rows, dim=1)]
    order = torch.cat(windows) + rows * columns * torch.arange(t)[:, None]  # (t, rows * columns)
    return order.flatten(), tuple(len(window) * merge_size**2 for window in windows) * t
