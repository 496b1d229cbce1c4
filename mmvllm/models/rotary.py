"""Rotary position embeddings: M-RoPE for the decoder, 2-D rotary for the ViT (arXiv 2104.09864, 2409.12191)."""

from functools import cache, lru_cache

import torch
from torch import Tensor

from mmvllm.transfer import to_device


@cache  # never dropped: a CUDA graph reads it
def inverse_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """theta ** (-2 j / dim) for j < dim / 2, in float32."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


@cache
def _axes(mrope_section: tuple[int, ...], device: torch.device) -> Tensor:
    """The position axis that each frequency is multiplied with: (D / 2,)."""
    axes = [axis for axis, size in enumerate(mrope_section) for _ in range(size)]
    return torch.tensor(axes, device=device)


def mrope_cos_sin(
    positions: Tensor, head_dim: int, theta: float, mrope_section: tuple[int, ...] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """positions (3, N) -> cos and sin (N, D / 2) in `dtype`.

    `mrope_section` divides the frequencies among the axes: for (16, 24, 24) the first 16 rotate with time, the next 24
    with height, the last 24 with width. Without it all rotate with the first axis, as in a text-only model.
    """
    axes = _axes(mrope_section or (head_dim // 2,), positions.device)
    rotating = positions.T[:, axes]  # (N, D / 2)
    angles = rotating.float() * inverse_frequencies(head_dim, theta, positions.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@lru_cache(maxsize=256)
def vision_positions(grid_thw: tuple[int, int, int], merge_size: int) -> Tensor:
    """Row and column (2, P) of each patch of an image, in merge order; on the CPU, cached for recent grids."""
    t, h, w = grid_thw
    m = merge_size
    rows_and_columns = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))
    blocks = rows_and_columns.view(2, h // m, m, w // m, m).transpose(2, 3).reshape(2, -1)
    return blocks.repeat(1, t)


def vision_cos_sin(grids: list[tuple[int, int, int]], merge_size: int, head_dim: int, device: torch.device):
    """cos and sin (P, D / 2) in float32: half of the frequencies rotate with the row, half with the column."""
    positions = to_device(torch.cat([vision_positions(grid, merge_size) for grid in grids], dim=1), device)  # (2, P)
    angles = positions[:, :, None].float() * inverse_frequencies(head_dim // 2, 10000.0, device)  # (2, P, D / 4)
    angles = torch.cat([angles[0], angles[1]], dim=-1)
    return angles.cos(), angles.sin()
