"""The most likely token of each row of logits, and the row's log-sum-exp, in one pass."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton


def argmax(logits: Tensor) -> Tensor:
    """Return the first largest logit's index (R,) int64 in each row (R, V); -1 if the logit is NaN or infinite."""
    return (argmax_triton if runs_triton(logits) else argmax_torch)(logits)


def argmax_logsumexp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return `argmax` (R,), and log(sum(exp(logits))) (R,) in float64, for exact differences to it."""
    return (argmax_logsumexp_triton if runs_triton(logits) else argmax_logsumexp_torch)(logits)


def argmax_torch(logits: Tensor) -> Tensor:
    return valid(*largest_torch(logits.float()))


def argmax_logsumexp_torch(logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    token_ids, largest = largest_torch(logits)
    sums = (logits - largest).exp_().sum(dim=-1)
    return valid(token_ids, largest), largest.squeeze(1).double() + sums.log()


def largest_torch(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and values (R, 1) of the largest float32 logits, or of the first NaN in a row that has one."""
    if logits.device.type == "cpu":  # numpy takes a fifth of torch's time
        token_ids = torch.from_numpy(logits.numpy().argmax(-1))[:, None]
        return token_ids, logits.gather(1, token_ids)
    largest, token_ids = logits.max(dim=-1, keepdim=True)
    return token_ids, largest


def valid(token_ids: Tensor, largest: Tensor) -> Tensor:
    """Return ids (R, 1) as (R,), -1 where the largest logit (R, 1) is NaN or infinite; writes to `token_ids`."""
    return token_ids.masked_fill_((largest - largest).bool(), -1).squeeze(1)  # NaN is true


def argmax_triton(logits: Tensor, block: int = 8192) -> Tensor:
    """Launch the kernel; a program loads `block` logits at once, a power of two."""
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _launch(logits, token_ids, None, block)
    return token_ids


def argmax_logsumexp_triton(logits: Tensor, block: int = 8192) -> tuple[Tensor, Tensor]:
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    logsumexp = torch.empty(len(logits), dtype=torch.float64, device=logits.device)
    _launch(logits, token_ids, logsumexp, block)
    return token_ids, logsumexp


def _launch(logits: Tensor, token_ids: Tensor, logsumexp: Tensor | None, block: int) -> None:
    R, V = logits.shape
    assert logits.stride(1) == 1
    with_sums = logsumexp is not None
    # 16 logits per thread keep enough loads in flight; not tuned.
    _argmax_kernel[(R,)](
        *(logits, token_ids, logsumexp, logits.stride(0)),
        **{"V": V, "WITH_SUMS": with_sums, "BLOCK": block},
        num_warps=16,
        enable_fp_fusion=True,  # the decaying sum is rounded once per value
    )


@triton.jit
def _argmax_kernel(
    logits_ptr, ids_ptr, sums_ptr, row_stride, V: tl.constexpr, WITH_SUMS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    token, largest, total = scan_row(row_ptr, V, WITH_SUMS, BLOCK)
    tl.store(ids_ptr + row, token)
    if WITH_SUMS:
        tl.store(sums_ptr + row, largest.to(tl.float64) + tl.log(total).to(tl.float64))


@triton.jit
def scan_row(row_ptr, V: tl.constexpr, WITH_SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit's id, or -1 if it is NaN or infinite; its value; and the sum of exp(logit - largest)."""
    at = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)  # per lane, like the next three
    best_at = tl.zeros((BLOCK,), tl.int32)
    is_nan = tl.zeros((BLOCK,), tl.int32)
    sums = tl.zeros((BLOCK,), tl.float32)  # of exp(logit - best), for finite best
    for start in range(0, V, BLOCK):
        x = tl.load(row_ptr + start + at, mask=start + at < V, other=float("-inf")).to(tl.float32)
        is_nan |= (x != x).to(tl.int32)
        if WITH_SUMS:
            highest = tl.maximum(best, x)
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            sums = sums * tl.exp(best - shift) + tl.exp(x - shift)
        best_at = tl.where(x > best, start + at, best_at)
        best = tl.maximum(best, x)
    largest = tl.max(best)
    token = tl.min(tl.where(best == largest, best_at, V))
    is_invalid = (tl.max(is_nan) > 0) | (tl.abs(largest) == float("inf"))
    total = tl.sum(sums * tl.exp(best - largest)) if WITH_SUMS else largest
    return tl.where(is_invalid, -1, token), largest, total


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    V = shapes.vocab_size
    for logits_dtype in dict.fromkeys((torch.float32, dtype)):
        for R in (1, 8, 64, 256):
            logits = 3 * torch.randn(R, V, device=device, dtype=logits_dtype)
            label = f"R={R} V={V} {str(logits_dtype).removeprefix('torch.')}"
            yield Case("argmax", label, (logits,), logits.nbytes)
            yield Case("argmax_logsumexp", label, (logits,), logits.nbytes)
