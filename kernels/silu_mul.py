"""The gated activation of the decoder's MLP."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvllm.kernels.dispatch import Case, KernelShapes, runs_triton, tl, triton


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (N, I) of contiguous gate_up (N, 2 I), gate first (SwiGLU, arXiv 2002.05202)."""
    assert gate_up.is_contiguous()
    return (silu_mul_triton if runs_triton(gate_up) else silu_mul_torch)(gate_up)


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    N, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(N, width, dtype=gate_up.dtype, device=gate_up.device)
    block = 1024  # with 4 warps, 8 values per thread: 16 bytes of a 16-bit dtype; not tuned
    grid = (N * triton.cdiv(width, block),)
    _silu_mul_kernel[grid](gate_up, out, WIDTH=width, BLOCK=block, num_warps=4, enable_fp_fusion=False)
    return out


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per BLOCK columns of a row, so that a single row uses several multiprocessors."""
    blocks = tl.cdiv(WIDTH, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    gate_ptr = gate_up_ptr + row * (2 * WIDTH) + at
    gate = tl.load(gate_ptr, mask=mask).to(tl.float32)
    up = tl.load(gate_ptr + WIDTH, mask=mask).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + at, gate * tl.sigmoid(gate) * up, mask=mask)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    width = shapes.intermediate_size
    for N in (1, 64, 1024, 4096):
        gate_up = torch.randn(N, 2 * width, device=device, dtype=dtype)
        yield Case("silu_mul", f"N={N} I={width}", (gate_up,), gate_up.nbytes * 3 // 2)
