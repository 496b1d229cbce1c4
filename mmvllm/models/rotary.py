"""Rotary position embeddings: M-RoPE for the decoder, 2-D rotary for the ViT (arXiv 2104.09864, 2409.12191)."""

from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from mmvllm.config import ModelConfig
from mmvllm.inputs import Grid
from mmvllm.models.hf_config import ROPE_THETA


@cache  # unbounded, because CUDA graphs read the tensors
def inverse_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """Return theta ** (-2 j / dim) for j < dim / 2, in float32."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


@cache  # unbounded, as above
def _axes(mrope_section: tuple[int, ...], interleaved: bool, device: torch.device) -> Tensor:
    """Return the position axis (D / 2,) that each frequency is multiplied by.

    (2, 3, 3)              time time height height height width width width
    (4, 2, 2) interleaved  time height width time height width time time
    """
    axes = [axis for axis, size in enumerate(mrope_section) for _ in range(size)]
    if interleaved:
        axes = [0] * len(axes)
        for axis, size in enumerate(mrope_section[1:], start=1):
            turns = range(axis, min(3 * size, len(axes)), 3)
            axes[axis : turns.stop : 3] = [axis] * len(turns)
    return torch.tensor(axes, device=device)


def mrope_cos_sin(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin (N, D / 2) in `dtype` for positions (3, N).

    `mrope_section` divides the frequencies among the axes: for (16, 24, 24), the first 16 rotate with time, the next 24
    with height and the last 24 with width, unless they are interleaved. Without it, as in a text-only model, all
    frequencies rotate with the first axis.
    """
    section = config.mrope_section or (config.head_dim // 2,)
    axes = _axes(section, config.mrope_interleaved, positions.device)
    rotating = positions.T[:, axes]  # (N, D / 2)
    angles = rotating.float() * inverse_frequencies(config.head_dim, config.rope_theta, positions.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def vision_positions(grids: Sequence[Grid], merge_size: int) -> Tensor:
    """Return row and column (2, P) of each patch of the packed images, in merge order; on the CPU."""
    return torch.cat([_image_positions(grid, merge_size) for grid in grids], dim=1)


@lru_cache(maxsize=256)
def _image_positions(grid: Grid, merge_size: int) -> Tensor:
    t, h, w = grid
    m = merge_size
    rows_and_columns = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))
    squares = rows_and_columns.view(2, h // m, m, w // m, m).transpose(2, 3)  # each becomes one token
    return squares.reshape(2, -1).repeat(1, t)


def vision_cos_sin(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin (P, D / 2) in float32 for rows and columns (2, P).

    Half of the frequencies rotate with the row, half with the column.
    """
    frequencies = inverse_frequencies(head_dim // 2, ROPE_THETA, positions.device)
    angles = positions[:, :, None].float() * frequencies  # (2, P, D / 4)
    angles = torch.cat([angles[0], angles[1]], dim=-1)
    return angles.cos(), angles.sin()
