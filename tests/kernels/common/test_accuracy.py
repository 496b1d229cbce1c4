"""The rule for errors of kernels: it passes kernels of equal errors in any draw, and fails kernels that are wrong."""

import pytest
import torch

from mmvllm.kernels.common.accuracy import NUM_VALUES, compare, relative_errors

HEADS, DIM, KEYS, TILE = 4, 64, 320, 64
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


class Draw:
    """Attention of one query on random keys, for enough sequences to give the rule `num_values` values."""

    def __init__(self, seed: int, dtype: torch.dtype, num_values: int = NUM_VALUES):
        generator = torch.Generator().manual_seed(seed)
        number = -(-num_values // (HEADS * DIM))
        self.q, self.k, self.v = (
            torch.randn(number, HEADS, rows, DIM, generator=generator).to(dtype) for rows in (1, KEYS, KEYS)
        )
        self.exact = attention(self.q.double(), self.k.double(), self.v.double())
        self.reference = attention(self.q, self.k, self.v)

    def problem_of(self, got: torch.Tensor) -> str | None:
        errors = (relative_errors(x, self.exact) for x in (got, self.reference))
        return compare(*errors, got.dtype).problem


def attention(q, k, v) -> torch.Tensor:
    scores = (q @ k.transpose(-1, -2)).float() / DIM**0.5
    return (scores.softmax(-1).to(v.dtype) @ v).squeeze(-2)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("num_values", [NUM_VALUES // 8, NUM_VALUES])
def test_a_kernel_with_errors_like_the_reference_passes_in_every_draw(num_values, dtype):
    """It adds the same products in another order."""
    order = torch.randperm(KEYS, generator=torch.Generator().manual_seed(0))
    for seed in range(20):
        draw = Draw(seed, dtype, num_values)
        assert draw.problem_of(attention(draw.q, draw.k[:, :, order], draw.v[:, :, order])) is None


@pytest.mark.thinned(4)
@DTYPES
@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_that_drops_a_tile_of_keys_fails(seed, dtype):
    draw = Draw(seed, dtype)
    got = attention(draw.q, draw.k[:, :, TILE:], draw.v[:, :, TILE:])
    assert "the quantile of" in draw.problem_of(got)


@pytest.mark.thinned(4)
@DTYPES
@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_with_one_wrong_row_of_a_hundred_fails(seed, dtype):
    """Rows of other sequences: values of the right size in the wrong place."""
    draw = Draw(seed, dtype)
    got = draw.reference.flatten(0, 1).clone()
    got[::100] = got.roll(1, 0)[::100]
    assert "the quantile of" in draw.problem_of(got.view_as(draw.reference))


@DTYPES
def test_a_kernel_with_a_single_wrong_value_fails(dtype):
    """It lies above the quantile, but not below the bound of the largest error."""
    draw = Draw(0, dtype)
    got = draw.reference.clone()
    got[0, 0, 0] += draw.exact[0, 0].abs().max().to(dtype)
    assert "the largest of" in draw.problem_of(got)


@DTYPES
def test_a_kernel_of_three_times_the_error_fails(dtype):
    draw = Draw(0, dtype)
    got = draw.exact + 3 * (draw.reference.double() - draw.exact) + 3 * draw.exact * torch.finfo(dtype).eps
    errors = (relative_errors(x, draw.exact) for x in (got, draw.reference))
    assert compare(*errors, dtype).problem is not None


def test_rows_of_small_values_count_as_much_as_others():
    """A wrong row a thousand times smaller than the others, which an error in absolute terms does not show."""
    exact = torch.ones(100, 100, dtype=torch.float64)
    exact[7] /= 1000
    reference = exact.half()
    got = reference.clone()
    got[7] = 0
    errors = (relative_errors(x, exact) for x in (got, reference))
    assert "the quantile of" in compare(*errors, torch.float16).problem


@pytest.mark.parametrize("number", [1, 500, NUM_VALUES])
def test_nan_and_infinity_fail(number):
    exact = torch.ones(number, 1, dtype=torch.float64)
    for value in (torch.nan, torch.inf):
        got = exact.float()
        got[-1] = value
        errors = (relative_errors(x, exact) for x in (got, exact.float()))
        assert compare(*errors, torch.float32).problem is not None
