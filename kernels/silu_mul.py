"""The gated activation of the decoder's MLP, alone and fused with rounding to 8 bits after it."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, supports_fp8, tl, triton
from mmvllm.kernels.fp8 import Fp8Rows, largest_magnitude, quantize_rows_torch, store_scaled


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (N, I) of contiguous gate_up (N, 2 I), gate first (SwiGLU, arXiv 2002.05202)."""
    assert gate_up.is_contiguous()
    return (silu_mul_triton if runs_triton(gate_up) else silu_mul_torch)(gate_up)


def silu_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    """Compute `silu_mul`, rounded to gate_up's dtype and then to 8 bits."""
    assert gate_up.is_contiguous()
    return (silu_mul_fp8_triton if runs_triton(gate_up) else silu_mul_fp8_torch)(gate_up)


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul_fp8_torch(gate_up: Tensor) -> Fp8Rows:
    return quantize_rows_torch(silu_mul_torch(gate_up))


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    N, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(N, width, dtype=gate_up.dtype, device=gate_up.device)
    block = 1024  # with 4 warps, 8 values per thread: 16 bytes of a 16-bit dtype; not tuned
    grid = (N * triton.cdiv(width, block),)
    _silu_mul_kernel[grid](gate_up, out, WIDTH=width, BLOCK=block, num_warps=4, enable_fp_fusion=False)
    return out


def silu_mul_fp8_triton(gate_up: Tensor) -> Fp8Rows:
    N, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = Fp8Rows.empty_like(gate_up[:, :width])
    block = min(4096, triton.next_power_of_2(width))  # with 8 warps, 16 values per thread; not tuned
    sizes = {"WIDTH": width, "BLOCK": block, "num_warps": 8, "enable_fp_fusion": False}  # as in `silu_mul_triton`
    _silu_mul_fp8_kernel[(N,)](gate_up, out.values, out.scale, **sizes)
    return out


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per BLOCK columns of a row, so that a single row uses several multiprocessors."""
    blocks = tl.cdiv(WIDTH, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    tl.store(out_ptr + row * WIDTH + at, _gated(gate_up_ptr + row * (2 * WIDTH) + at, mask, WIDTH), mask=mask)


@triton.jit
def _silu_mul_fp8_kernel(gate_up_ptr, out_ptr, scale_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row, which it computes twice: for the scale, and then, from the cache, to round with it.

    A long row, of 18,944 values for example, does not fit a program's registers.
    """
    row = tl.program_id(0).to(tl.int64)
    gate_up_ptr += row * (2 * WIDTH)
    largest = 0.0
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        rounded = _gated(gate_up_ptr + at, at < WIDTH, WIDTH).to(gate_up_ptr.dtype.element_ty)
        largest = tl.maximum(largest, largest_magnitude(rounded, at < WIDTH))
    tl.store(scale_ptr + row, tl.div_rn(largest, 448.0))
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        rounded = _gated(gate_up_ptr + at, at < WIDTH, WIDTH).to(gate_up_ptr.dtype.element_ty)
        store_scaled(rounded, largest, out_ptr + row * WIDTH + at, at < WIDTH)


@triton.jit
def _gated(gate_ptr, mask, WIDTH: tl.constexpr):
    gate = tl.load(gate_ptr, mask=mask).to(tl.float32)
    up = tl.load(gate_ptr + WIDTH, mask=mask).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    width = shapes.intermediate_size
    for N in (1, 64, 1024, 4096):
        gate_up = torch.randn(N, 2 * width, device=device, dtype=dtype)
        shape = f"N={N} I={width}"
        yield Case("silu_mul", shape, (gate_up,), gate_up.nbytes * 3 // 2)
        if supports_fp8(device):
            yield Case("silu_mul_fp8", shape, (gate_up,), gate_up.nbytes + N * (width + 4))
