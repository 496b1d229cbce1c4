"""Linear layers with weights quantized in groups of columns: (qweight - zero) * scale.

The difference qweight - zero is exact in 16 bits. The sum of a tile's products is scaled in float32, so the weight is
not rounded again, and fewer values are scaled than the weight has. As in Marlin (arXiv 2408.11743), integers become
floats by setting bits, and several programs share the sum over columns if there are few rows.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton
from mmvllm.kernels.paged_attention import done_counts, num_splits

_MAX_SPLIT_TILES = 1024  # products are split only if they have fewer than two tiles per multiprocessor
PACKED_COLUMNS = 32  # of 4 bits, in 16 bytes: byte i has column i in its low bits, column i + 16 in its high bits


def quantized_linear(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b (N, out) in x's dtype, for x (N, in) and a quantized weight W (out, in).

    qweight is contiguous: int8 or e4m3 (out, in), or 4 bits packed by `pack_int4`. scales (out, groups) may have any
    float dtype and any strides; (groups, out) in memory takes the fewest reads. zeros have the shape and the strides of
    scales, and the dtype of qweight; None if all are 0. `supports_groups` checks group sizes. e4m3 needs compute
    capability 8.9.

    On CUDA, nothing is read on the host, so a CUDA graph can capture any call but the first. A row of the result
    depends on other rows only through their number, which selects tiles and splits.
    """
    assert x.is_contiguous() and qweight.is_contiguous()
    assert supports_groups(_bits(qweight), x.shape[1], scales.shape[1])
    assert zeros is None or (zeros.shape, zeros.stride()) == (scales.shape, scales.stride())
    return (quantized_linear_triton if runs_triton(x) else quantized_linear_torch)(x, qweight, scales, zeros, bias)


def supports_groups(bits: int, in_size: int, groups: int) -> bool:
    """Return whether rows can have this many groups: one, or groups of a multiple of 32 columns (of 16 in 8 bits)."""
    return groups == 1 or in_size % (groups * (PACKED_COLUMNS if bits == 4 else 16)) == 0


def _bits(qweight: Tensor) -> int:
    return 4 if qweight.dtype == torch.uint8 else 8


def pack_int4(qweight: Tensor) -> Tensor:
    """Pack values from 0 to 15 (out, in) uint8 as (out, 16 * ceil(in / 32)) uint8, two of them in each byte.

    The 16 bytes of 32 columns have the first 16 columns in their low bits and the others in their high bits: a thread
    reads 16 bytes at once, and each half of their bits belongs to consecutive inputs.
    """
    padded = F.pad(qweight, (0, -qweight.shape[1] % PACKED_COLUMNS))
    low, high = padded.unflatten(1, (-1, 2, PACKED_COLUMNS // 2)).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_int4(packed: Tensor, in_size: int) -> Tensor:
    """Invert `pack_int4`; return (out, in_size)."""
    halves = packed.unflatten(1, (-1, 1, PACKED_COLUMNS // 2))
    return torch.cat([halves & 15, halves >> 4], dim=2).flatten(1)[:, :in_size]


def quantized_linear_torch(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Compute the reference, which rounds the weight to x's dtype, unlike the kernel."""
    qweight = unpack_int4(qweight, x.shape[1]) if _bits(qweight) == 4 else qweight
    values = qweight.float().unflatten(1, (scales.shape[1], -1))
    values = values if zeros is None else values - zeros.float()[..., None]
    return F.linear(x, (values * scales.float()[..., None]).flatten(1).to(x.dtype), bias)


def quantized_linear_triton(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Compute `quantized_linear` in one kernel; a CUDA graph capture must not be its first call."""
    (N, in_size), (out_size, groups) = x.shape, scales.shape
    out = x.new_empty(N, out_size)
    if N == 0:
        return out
    group = in_size // groups if groups > 1 else 0
    block_m, block_n, block_k, num_warps, num_stages = _tile_sizes(N, group, x.dtype)
    tiles = triton.cdiv(N, block_m), triton.cdiv(out_size, block_n)
    steps, number = triton.cdiv(in_size, block_k), tiles[0] * tiles[1]
    split_steps = triton.cdiv(steps, num_splits(number, in_size, block_k, x.device))
    splits = triton.cdiv(steps, split_steps)
    parts = x.new_empty(splits if splits > 1 else 0, N, out_size, dtype=torch.float32)
    done = done_counts(_MAX_SPLIT_TILES, x.device)
    _quantized_linear_kernel[(*tiles, splits)](
        *(x, qweight, scales, zeros, bias, out, parts, done),
        *(N, out_size, in_size, *scales.stride(), steps, split_steps),
        *(group, _bits(qweight), block_m, block_n, block_k),
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=True,  # sums of scaled tiles are rounded once
    )
    return out


def _tile_sizes(N: int, group: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Return a tile's rows, outputs and inputs, its warps, and how many tiles are loaded ahead; not tuned."""
    widest = 32 if dtype == torch.float32 else 128 if N <= 128 else 64
    block_k = min(widest, group & -group) if group else widest  # within a group
    if dtype == torch.float32:  # needs twice the space and does not use tensor cores
        return 16, 64, block_k, 4, 3
    if N <= 32:
        return 16 if N <= 16 else 32, 64, block_k, 4, 4
    return (64, 128, block_k, 8, 3) if N <= 128 else (128, 128, block_k, 8, 3)


# The number of rows, and numbers of steps that depend on it, are not specialized.
@triton.jit(do_not_specialize=["N", "steps", "split_steps"])
def _quantized_linear_kernel(
    x_ptr,
    qweight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    done_ptr,
    N,
    OUT,
    IN,
    scale_stride,
    group_stride,
    steps,
    split_steps,
    GROUP: tl.constexpr,  # 0 if there is one group
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of rows and of outputs, and split of the columns.

    The weight is the left operand, because tensor cores take that from registers, where its values are computed.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    BYTES: tl.constexpr = BLOCK_K * BITS // 8
    byte = tl.arange(0, BYTES)
    at = byte // 16 * 32 + byte % 16 if BITS == 4 else byte  # the column of a byte, or of its low bits
    width = tl.cdiv(IN, 32) * 16 if BITS == 4 else IN
    has_row, has_column = row[None, :] < N, column[:, None] < OUT
    x_rows = x_ptr + row[None, :].to(tl.int64) * IN
    qweight_rows = qweight_ptr + column[:, None].to(tl.int64) * width
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    start = tl.program_id(2) * split_steps
    zero = _of_group(zeros_ptr, start, column, scale_stride, group_stride, OUT, GROUP, BLOCK_K)
    scale = _of_group(scales_ptr, start, column, scale_stride, group_stride, OUT, GROUP, BLOCK_K)
    for step in range(start, tl.minimum(start + split_steps, steps)):
        # Load one step ahead: the compiler does so only for the operands of the product.
        ahead = tl.minimum(step + 1, steps - 1)
        next_zero = _of_group(zeros_ptr, ahead, column, scale_stride, group_stride, OUT, GROUP, BLOCK_K)
        next_scale = _of_group(scales_ptr, ahead, column, scale_stride, group_stride, OUT, GROUP, BLOCK_K)
        offset = step * BYTES + byte[None, :]
        qweight = tl.load(qweight_rows + offset, mask=has_column & (offset < width), other=0.0)
        inputs = step * BLOCK_K + at[:, None]
        x = tl.load(x_rows + inputs, mask=has_row & (inputs < IN), other=0.0)
        if BITS == 4:
            other = tl.load(x_rows + inputs + 16, mask=has_row & (inputs + 16 < IN), other=0.0)
            part = tl.dot(_differences(qweight & 15, zero, dtype), x, input_precision="ieee")
            part = tl.dot(_differences(qweight >> 4, zero, dtype), other, part, input_precision="ieee")
        else:
            weight = qweight.to(dtype) if zeros_ptr is None else qweight.to(dtype) - zero.to(dtype)[:, None]
            part = tl.dot(weight, x, input_precision="ieee")
        acc += part * scale.to(tl.float32)[:, None] if GROUP else part
        zero, scale = next_zero, next_scale

    offset = row[None, :].to(tl.int64) * OUT + column[:, None]
    exists = has_row & has_column
    splits = tl.num_programs(2)
    is_last = True
    if splits > 1:
        size = tl.cast(N, tl.int64) * OUT
        tl.store(parts_ptr + tl.program_id(2) * size + offset, acc, mask=exists)
        tl.debug_barrier()  # one thread increments the count, after all threads have stored
        done = done_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        is_last = tl.atomic_add(done, 1, sem="acq_rel") == splits - 1
        if is_last:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            UNROLL: tl.constexpr = 4 if BLOCK_M <= 32 else 1  # parts of small tiles that are read at once
            for split in tl.range(0, splits, loop_unroll_factor=UNROLL):  # in this order, whichever program is last
                acc += tl.load(parts_ptr + split * size + offset, mask=exists, other=0.0)
            tl.store(done, 0)
    if is_last:
        if not GROUP:
            acc *= scale.to(tl.float32)[:, None]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + column, mask=column < OUT, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + offset, acc, mask=exists)


@triton.jit
def _of_group(ptr, step, column, scale_stride, group_stride, OUT, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the zeros or scales (BLOCK_N,) of the columns of a step; 0 without a pointer."""
    if ptr is None:
        values = tl.zeros_like(column).to(tl.int8)
    else:
        group = step * BLOCK_K // GROUP if GROUP else 0
        values = tl.load(ptr + column * scale_stride + group * group_stride, mask=column < OUT, other=0)
    return values


@triton.jit
def _differences(qweight, zero, dtype: tl.constexpr):
    """Return qweight - zero in `dtype`, both from 0 to 15; set bits in a power of two's mantissa add qweight to it."""
    if dtype == tl.float16:
        values = (qweight.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (zero.to(tl.float16) + 1024)[:, None]
    elif dtype == tl.bfloat16:
        values = (qweight.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - (zero.to(tl.bfloat16) + 128)[:, None]
    else:
        values = qweight.to(dtype) - zero.to(dtype)[:, None]
    return values


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield products of the decoder's MLP: 4 bits in groups of 128 with zeros, and 8 bits with a scale per output."""
    C, width = shapes.hidden_size, shapes.intermediate_size
    for in_size, out_size in ((C, 2 * width), (width, C)):
        for bits, groups in ((4, max(1, in_size // 128)), (8, 1)):
            qweight = torch.randint(0, 16, (out_size, in_size), dtype=torch.uint8, device=device)
            qweight = pack_int4(qweight) if bits == 4 else qweight.to(torch.int8)
            scales = torch.rand(groups, out_size, device=device).to(torch.float16).t()
            zeros = torch.randint_like(scales, 16).to(torch.uint8) if bits == 4 else None
            for N in (1, 32, 64, 1024):
                x = torch.randn(N, in_size, device=device, dtype=dtype)
                moved = x.nbytes + qweight.nbytes + scales.nbytes + N * out_size * x.itemsize
                moved += 0 if zeros is None else zeros.nbytes
                label = f"{bits} bits, N={N} {in_size}->{out_size}"
                args = (x, qweight, scales, zeros, None)
                yield Case("quantized_linear", label, args, moved, 2 * N * in_size * out_size)
