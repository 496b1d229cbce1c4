"""Sampling of token ids from logits, with temperature, top-k, top-p and min-p."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mmvllm.kernels.dispatch import Case, KernelShapes, runs_triton, tl, triton


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of logits (R, V), by its inverse cumulative distribution at `uniform` in [0, 1) -> (R,) int64.

    Temperature, then top-k, top-p (arXiv 1904.09751) and min-p (2407.01082) as thresholds, in transformers' order.
    Each filter keeps all tokens that tie with the last one it keeps. Logits are float32, the other arguments contiguous
    (R,): temperature above 0; top_k int32, V disables it; top_p 1 and min_p 0 disable them. A row whose largest logit
    is not finite gets an arbitrary id below V.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert all(x.is_contiguous() for x in (temperature, top_k, top_p, min_p, uniform))
    draw = sample_triton if runs_triton(logits) else sample_torch
    return draw(logits, temperature, top_k, top_p, min_p, uniform)


def sample_torch(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    vocab_size = logits.shape[-1]
    temperature, top_k, top_p, min_p, uniform = (x[:, None] for x in (temperature, top_k, top_p, min_p, uniform))
    # Shifted so that the largest is 0, and with temperatures clamped so that float32 quotients stay finite: beyond this
    # range the distribution is already greedy, or uniform.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp(1e-6, 1e6)
    if (top_k < vocab_size).any() or (top_p < 1).any():
        ordered = logits.sort(dim=-1, descending=True).values  # (R, V)
        last = ordered.gather(1, top_k.long() - 1)
        logits = logits.masked_fill(logits < last, float("-inf"))
        probs = ordered.masked_fill(ordered < last, float("-inf")).softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # mass of all more likely tokens; the first is always kept
        num_kept = ((before < top_p) | (top_p >= 1)).sum(dim=-1, keepdim=True).clamp(min=1)
        logits = logits.masked_fill(logits < ordered.gather(1, num_kept - 1), float("-inf"))
    logits = logits.masked_fill(logits < min_p.log(), float("-inf"))
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)  # (R, V), in vocabulary order
    wanted = uniform.double() * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(1).clamp(max=vocab_size - 1)


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    block: int = 8192,
) -> Tensor:
    """`block` is the number of logits that a program loads at once, a power of two."""
    R, V = logits.shape
    out = torch.empty(R, dtype=torch.int64, device=logits.device)
    # A program reads its row from the L2 cache 3 times, and 8 to 16 times more for each of top-k and top-p. At 5 to 11
    # us per read of 152064 logits, that is about 25 us for temperature alone, 170 us with top-p and 250 us with both:
    # estimates from instruction counts, not measured. Splitting a row would help small batches only.
    # 16 logits per thread keep enough loads in flight, and leave registers for three sums of each; not tuned.
    _sample_kernel[(R,)](
        *(logits, temperature, top_k, top_p, min_p, uniform, out, logits.stride(0)),
        **{"V": V, "BLOCK": block},
        num_warps=16,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    out_ptr,
    row_stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row. It does not sort: it searches for the smallest logit that the filters keep."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    temperature = tl.minimum(tl.maximum(tl.load(temperature_ptr + row), 1e-6), 1e6)
    inverse = tl.div_rn(1.0, temperature)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    largest = _largest(row_ptr, V, BLOCK)
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
    uniform = tl.load(uniform_ptr + row).to(tl.float64)
    tl.store(out_ptr + row, _draw(row_ptr, threshold, largest, inverse, uniform, V, BLOCK))


@triton.jit
def _largest(row_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        largest = tl.maximum(largest, tl.load(row_ptr + start + at, mask=start + at < V, other=float("-inf")))
    return tl.max(largest)


@triton.jit
def _last_kept(row_ptr, lowest, largest, inverse, wanted, BY_MASS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Smallest x of [lowest, largest] such that the total weight of all logits above x is less than `wanted`.

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
            x = tl.load(row_ptr + start + at, mask=start + at < V, other=float("-inf"))
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
    """An int64 key that orders float32 values: their bits, with those of negative numbers inverted below the sign."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _key_to_float(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kept_weights(row_ptr, start, threshold, largest, inverse, V: tl.constexpr, BLOCK: tl.constexpr):
    """Probabilities, relative to the largest's, of the tile at `start`; 0 below the threshold and beyond V."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + at, mask=at < V, other=float("-inf"))
    return tl.where(x >= threshold, tl.exp((x - largest) * inverse), 0.0)


@triton.jit
def _kept_mass(row_ptr, threshold, largest, inverse, V: tl.constexpr, BLOCK: tl.constexpr):
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, V, BLOCK):
        mass += tl.sum(_kept_weights(row_ptr, start, threshold, largest, inverse, V, BLOCK)).to(tl.float64)
    return mass


@triton.jit
def _draw(row_ptr, threshold, largest, inverse, uniform, V: tl.constexpr, BLOCK: tl.constexpr):
    """The first token whose cumulative mass is more than `uniform` of the total, else the last of positive weight.

    Sums within a tile are trees in float32, or float64 for the tile of the token; sums over tiles are float64.
    """
    wanted = uniform * _kept_mass(row_ptr, threshold, largest, inverse, V, BLOCK)
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
    # In a tree-shaped scan rounding may raise the sum at a token of weight 0: such a token is not drawn.
    token = tl.min(tl.where((weights > 0) & (cumulative > wanted), at, V))
    return tl.minimum(token, tl.max(tl.where(weights > 0, at, 0)))


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Logits are float32 in any dtype."""
    V = shapes.vocab_size
    for R in (1, 8, 64):
        logits, uniform = 3 * torch.randn(R, V, device=device), torch.rand(R, device=device)
        for top_k, top_p in ((V, 1.0), (V, 0.9), (50, 0.9)):
            filters = (torch.full((R,), top_k, dtype=torch.int32), torch.full((R,), top_p), torch.zeros(R))
            args = (logits, torch.ones(R, device=device), *(x.to(device) for x in filters), uniform)
            yield Case("sample", f"R={R} V={V} top_k={top_k} top_p={top_p}", args, logits.nbytes)
