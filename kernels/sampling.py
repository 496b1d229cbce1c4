"""Sampling of token ids from logits, with temperature, top-k, top-p and min-p."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from mmvllm.kernels.argmax import largest_torch, scan_row, valid
from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton
from mmvllm.kernels.common.row_params import ROW_PARAMS, column, load_float, packed
from mmvllm.kernels.common.uniforms import uniform, uniforms


def sample(logits: Tensor, params: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Sample a token per row of logits (R, V): (R,) int64, -1 where the largest logit is NaN or infinite.

    Sequence r has row `rows[r]` of `params` (N, 12) int32 and `ends[r]` tokens before this one (both int32). A
    temperature of 0 takes the first largest logit. Other temperatures draw by the inverse cumulative distribution, at
    the uniform number of the sequence's stream and the token's index in its completion. Temperature, top-k, top-p
    (arXiv 1904.09751) and min-p (2407.01082) apply in transformers' order, the filters as thresholds: each keeps all
    tokens that tie with the last one it keeps.
    """
    assert logits.stride(1) == 1 and params.is_contiguous() and rows.is_contiguous() and ends.is_contiguous()
    return (sample_triton if runs_triton(logits) else sample_torch)(logits, params, rows, ends)


def sample_torch(logits: Tensor, params: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    params, logits = params.index_select(0, rows), logits.float()
    token_ids, largest = largest_torch(logits)
    temperature, top_k, top_p, min_p = (column(params, name) for name in ("temperature", "top_k", "top_p", "min_p"))
    # The largest logit is shifted to 0, and temperatures are clamped to keep float32 quotients finite: beyond this
    # range the distribution is already greedy, or uniform.
    scaled = (logits - largest).div_(temperature.clamp(1e-6, 1e6))
    threshold = _threshold(scaled, top_k, top_p, min_p)
    cumulative = _weights(scaled, threshold).double().cumsum_(dim=-1)  # (R, V), in vocabulary order
    indices = ends[:, None] - column(params, "num_prompt_tokens")
    drawn = _first_above(cumulative, uniforms(column(params, "stream"), indices) * cumulative[:, -1:])
    return valid(torch.where(temperature > 0, drawn, token_ids), largest)


def _threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor | None:
    """Return the smallest logits (R, 1) that the filters keep, of logits with a maximum of 0; None if they keep all."""
    V, threshold = logits.shape[1], None
    by_number, by_mass = top_k.min().item() < V, top_p.min().item() < 1
    if by_number or by_mass:
        ordered = _sorted(logits)  # (R, V), ascending
        if by_number:
            threshold = ordered.gather(1, V - top_k.long())
        if by_mass:
            # The mass above the last kept logit is less than top_p, and there is none above the largest.
            mass = _weights(ordered, threshold).cumsum_(dim=-1)
            threshold = ordered.gather(1, _first_above(mass, mass[:, -1:] * (1 - top_p)))
    if min_p.max().item() > 0:
        threshold = min_p.log() if threshold is None else torch.maximum(threshold, min_p.log())
    return threshold


def _weights(logits: Tensor, threshold: Tensor | None) -> Tensor:
    """Return exp(logits), or 0 below a threshold (R, 1)."""
    weights = logits.exp()
    if threshold is not None:
        # A comparison to 1.0 or 0.0 and its product take a quarter of the time that bool takes.
        weights.mul_(torch.ge(logits, threshold, out=torch.empty_like(logits)))
    return weights


def _first_above(sums: Tensor, wanted: Tensor) -> Tensor:
    """Return the index of the first of cumulative sums (R, V) above a value (R, 1), or of the last."""
    return torch.searchsorted(sums, wanted, right=True).clamp_(max=sums.shape[1] - 1)


def _sorted(x: Tensor) -> Tensor:
    if x.device.type == "cpu":  # numpy takes a tenth of the time of torch, which also sorts indices
        return torch.from_numpy(np.sort(x.numpy(), axis=-1))
    return x.sort(dim=-1).values


def sample_triton(logits: Tensor, params: Tensor, rows: Tensor, ends: Tensor, block: int = 8192) -> Tensor:
    """Launch the kernel; a program loads `block` logits at once, a power of two."""
    R, V = logits.shape
    out = torch.empty(R, dtype=torch.int64, device=logits.device)
    # A program reads its row from the L2 cache 3 times, and 8 to 16 times more for each of top-k and top-p. At 5 to 11
    # us per read of 152064 logits, that is about 25 us for temperature alone, 170 us with top-p and 250 us with both:
    # estimates from instruction counts, not measured. Splitting a row would help small batches only.
    # 16 logits per thread keep enough loads in flight, and leave registers for three sums of each; not tuned.
    _sample_kernel[(R,)](
        *(logits, params, rows, ends, out, logits.stride(0)),
        **{"V": V, "BLOCK": block},
        num_warps=16,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _sample_kernel(
    logits_ptr, params_ptr, rows_ptr, ends_ptr, out_ptr, row_stride, V: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row, which searches for the smallest logit that the filters keep instead of sorting."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    params_ptr += tl.load(rows_ptr + row) * 12
    token, largest, _ = scan_row(row_ptr, V, False, BLOCK)
    if (load_float(params_ptr, 0) > 0) & (token >= 0):
        token = _random_token(row_ptr, params_ptr, tl.load(ends_ptr + row), largest, V, BLOCK)
    tl.store(out_ptr + row, token)


@triton.jit
def _random_token(row_ptr, params_ptr, end, largest, V: tl.constexpr, BLOCK: tl.constexpr):
    temperature = tl.minimum(tl.maximum(load_float(params_ptr, 0), 1e-6), 1e6)
    inverse = tl.div_rn(1.0, temperature)
    top_k, top_p, min_p = tl.load(params_ptr + 1), load_float(params_ptr, 2), load_float(params_ptr, 3)
    threshold = tl.full((), float("-inf"), tl.float32)
    if top_k < V:
        threshold = _last_kept(row_ptr, threshold, largest, inverse, top_k.to(tl.float32), False, V, BLOCK)
    if top_p < 1:
        mass = _kept_mass(row_ptr, threshold, largest, inverse, V, BLOCK).to(tl.float32)
        # V tokens below this together weigh less than 1 - top_p of the largest. The 1 is a margin for rounding.
        lowest = largest - temperature * (tl.log(V / (1 - top_p)) + 1)
        # The largest logit weighs 1, and is always kept.
        wanted = tl.maximum(top_p * mass, 1.0)
        threshold = _last_kept(row_ptr, tl.maximum(threshold, lowest), largest, inverse, wanted, True, V, BLOCK)
    if min_p > 0:
        threshold = tl.maximum(threshold, largest + temperature * tl.log(min_p))
    low, high = tl.load(params_ptr + 4).to(tl.uint32), tl.load(params_ptr + 5).to(tl.uint32)
    number = uniform((high.to(tl.uint64) << 32) | low.to(tl.uint64), (end - tl.load(params_ptr + 6)).to(tl.uint64))
    return _draw(row_ptr, threshold, largest, inverse, number, V, BLOCK)


@triton.jit
def _last_kept(row_ptr, lowest, largest, inverse, wanted, BY_MASS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest x in [lowest, largest] such that all logits above x weigh less than `wanted` in total.

    A logit weighs 1, or its probability relative to the largest's if `BY_MASS`. Each round divides the range of 32-bit
    integer keys of floats by four: at most 16 rounds for any logits.
    """
    at = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), tl.float32)
    low, high = _float_to_key(lowest) - 1, _float_to_key(largest)  # the result is in (low, high]
    while high - low > 1:
        step = (high - low + 3) // 4
        x1, x2, x3 = _key_to_float(low + step), _key_to_float(low + 2 * step), _key_to_float(low + 3 * step)
        above1, above2, above3 = zeros, zeros, zeros  # as counts they are exact: below 2**24
        for start in range(0, V, BLOCK):
            x = tl.load(row_ptr + start + at, mask=start + at < V, other=float("-inf")).to(tl.float32)
            weight = tl.exp((x - largest) * inverse) if BY_MASS else zeros + 1
            above1 += tl.where(x > x1, weight, 0.0)
            above2 += tl.where(x > x2, weight, 0.0)
            above3 += tl.where(x > x3, weight, 0.0)
        sum1, sum2, sum3 = tl.sum(above1), tl.sum(above2), tl.sum(above3)
        low += step * ((sum1 >= wanted).to(tl.int64) + (sum2 >= wanted).to(tl.int64) + (sum3 >= wanted).to(tl.int64))
        high = tl.minimum(high, low + step)
        if not BY_MASS:  # with exactly `wanted` logits above low, the threshold low + 1 keeps exactly these
            found = (sum1 == wanted) | (sum2 == wanted) | (sum3 == wanted)
            high = tl.where(found, low + 1, high)
    return _key_to_float(high)


@triton.jit
def _float_to_key(x):
    """Return an int64 key that orders float32 values: their bits, inverted below the sign if negative."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _key_to_float(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kept_weights(row_ptr, start, threshold, largest, inverse, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tile's probabilities at `start`, relative to the largest; 0 below the threshold and beyond V."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
    return tl.where(x >= threshold, tl.exp((x - largest) * inverse), 0.0)


@triton.jit
def _kept_mass(row_ptr, threshold, largest, inverse, V: tl.constexpr, BLOCK: tl.constexpr):
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, V, BLOCK):
        mass += tl.sum(_kept_weights(row_ptr, start, threshold, largest, inverse, V, BLOCK)).to(tl.float64)
    return mass


@triton.jit
def _draw(row_ptr, threshold, largest, inverse, number, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first token whose cumulative mass exceeds `number` of the total, else the last with a positive weight.

    Sums within a tile are trees in float32, or float64 for the tile of the token; sums over tiles are float64.
    """
    wanted = number * _kept_mass(row_ptr, threshold, largest, inverse, V, BLOCK)
    mass = tl.full((), 0.0, tl.float64)  # of all tiles so far
    tile, before = 0, mass  # the token's tile, and the mass before it
    for start in range(0, V, BLOCK):
        tile_mass = tl.sum(_kept_weights(row_ptr, start, threshold, largest, inverse, V, BLOCK))
        reached = (mass <= wanted) & (tile_mass > 0)
        tile = tl.where(reached, start, tile)
        before = tl.where(reached, mass, before)
        mass += tile_mass.to(tl.float64)
    at = tile + tl.arange(0, BLOCK)
    weights = _kept_weights(row_ptr, tile, threshold, largest, inverse, V, BLOCK)
    cumulative = before + tl.cumsum(weights.to(tl.float64), 0)
    # Rounding in a tree-shaped scan may raise the sum at a token of weight 0, which must not be drawn.
    token = tl.min(tl.where((weights > 0) & (cumulative > wanted), at, V))
    return tl.minimum(token, tl.max(tl.where(weights > 0, at, 0)))


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield cases with float32 logits for every dtype."""
    V = shapes.vocab_size
    for R in (1, 8, 64):
        logits = 3 * torch.randn(R, V, device=device)
        rows = torch.arange(R, dtype=torch.int32, device=device)
        for top_k, top_p in ((V, 1.0), (V, 0.9), (50, 0.9)):
            params = np.zeros(R, ROW_PARAMS)
            params["temperature"], params["top_k"], params["top_p"] = 1.0, top_k, top_p
            args = (logits, packed(params).to(device), rows, torch.zeros_like(rows))
            yield Case("sample", f"R={R} V={V} top_k={top_k} top_p={top_p}", args, logits.nbytes)
