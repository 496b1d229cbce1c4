import pytest
import torch

from mmvllm.kernels import lora as file
from mmvllm.kernels.common.dispatch import KernelShapes
from mmvllm.kernels.lora import lora_add, lora_add_torch, lora_add_triton
from tests.helpers.models.kernels import assert_no_worse


def arguments(counts, widths, in_size, rank, device, dtype):
    """Every third row of y has no adapter; the others are spread over the slots in a random order."""
    torch.manual_seed(0)
    L, slots = sum(counts), len(counts)
    N = L + L // 2 + 1
    x, y = (torch.randn(N, size, device=device).to(dtype) for size in (in_size, sum(widths)))
    a = (torch.randn(slots, len(widths), rank, in_size, device=device) / in_size**0.5).to(dtype)
    b = (torch.randn(slots, sum(widths), rank, device=device) / rank**0.5).to(dtype)
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    return y, x, a, b, torch.randperm(N, device=device)[:L], ends, widths


def result(function, y, *rest):
    y = y.clone()
    function(y, *rest)
    return y


def exact(y, x, a, b, rows, ends, widths):
    """The definition, in float64, one row at a time."""
    y = y.double()
    for i, row in enumerate(rows.tolist()):
        slot = int(torch.searchsorted(ends, i, right=True))
        h = a[slot].double() @ x[row].double()  # (parts, rank)
        wide = torch.cat([own[None].expand(width, -1) for own, width in zip(h, widths, strict=True)])
        y[row] += (b[slot].double() * wide).sum(1)
    return y


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("counts", "widths", "in_size", "rank"),
    [
        ([5, 0, 17, 16, 1], (48, 16, 16), 64, 16),  # no rows, more than a tile, exactly one tile, one row
        ([0, 0, 7], (48, 16), 64, 16),
        ([1], (24,), 32, 8),
        ([0, 0], (24,), 32, 8),
        ([3, 0, 2], (131, 7), 1100, 3),  # inputs of two programs, sizes that are not even
        ([2, 18], (64,), 200, 20),
    ],
    ids=str,
)
def test_error_is_bounded_by_the_reference(counts, widths, in_size, rank, device, dtype):
    given = arguments(counts, widths, in_size, rank, device, dtype)
    want = exact(*given)
    for function in (lora_add, lora_add_triton):
        assert_no_worse(result(function, *given), result(lora_add_torch, *given), want)


@pytest.mark.slow
def test_larger_tiles(device):
    given = arguments([150, 3, 40], (40, 8), 48, 16, device, torch.float16)
    assert_no_worse(result(lora_add_triton, *given), result(lora_add_torch, *given), exact(*given))


@pytest.mark.slow
def test_rows_do_not_depend_on_other_slots(device, dtype):
    y, x, a, b, rows, ends, widths = arguments([9, 20, 4], (24, 8), 32, 8, device, dtype)
    want = result(lora_add_triton, y, x, a, b, rows, ends, widths)
    alone = torch.tensor([0, 20, 20], dtype=torch.int32, device=device)
    got = result(lora_add_triton, y, x, a, b, rows[9:29], alone, widths)
    assert torch.equal(got[rows[9:29]], want[rows[9:29]])
    others = torch.ones(len(y), dtype=torch.bool).index_fill_(0, rows[9:29].cpu(), False)
    assert torch.equal(got[others], y[others])


def test_cases_are_valid():
    shapes = KernelShapes(2, 1, 8, hidden_size=16, intermediate_size=24, vocab_size=9, vision=None, experts=None)
    found = list(file.cases(shapes, torch.device("cpu"), torch.float32))
    assert [case.label for case in found][::3] == ["N=1 16->16+8+8", "N=1 24->16"]
    for case in found:
        lora_add_torch(*case.args)
