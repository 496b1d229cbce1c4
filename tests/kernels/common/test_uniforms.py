"""Random numbers: known values, equal in torch and in Triton, and as random as a test of frequencies can tell."""

import numpy as np
import pytest
import torch

from mmvllm.kernels.common.dispatch import tl, triton
from mmvllm.kernels.common.uniforms import stream_of, uniform, uniforms
from tests.helpers.models.sampling import stream_with


@triton.jit
def _uniform_kernel(streams_ptr, indices_ptr, out_ptr):
    at = tl.program_id(0)
    stream, index = tl.load(streams_ptr + at).to(tl.uint64), tl.load(indices_ptr + at).to(tl.uint64)
    tl.store(out_ptr + at, uniform(stream, index))


def numbers(seeds, indices) -> torch.Tensor:
    """(seeds, indices) float64"""
    streams = torch.tensor([stream_of(seed) for seed in seeds])[:, None]
    return uniforms(streams, torch.tensor([*indices])[None])


def test_known_values():
    """The first outputs of SplitMix64 from state 1234567, as published with its C code, and of streams of seeds."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    got = uniforms(torch.tensor([1234567]), torch.arange(4))
    assert got.tolist() == [(output >> 11) / 2**53 for output in outputs]
    assert stream_of(1234567) % 2**64 == outputs[0]
    assert stream_of(-1) == stream_of(2**64 - 1) != stream_of(2**64) == stream_of(0)


def test_equal_in_triton(device):
    generator = torch.Generator().manual_seed(0)
    streams = torch.randint(-(2**63), 2**63 - 1, (50,), generator=generator)
    streams[:3] = torch.tensor([0, -1, 2**63 - 1])
    indices = torch.randint(0, 2**20, (50,), generator=generator)
    indices[:3] = 0
    out = torch.empty(50, dtype=torch.float64, device=device)
    _uniform_kernel[(50,)](streams.to(device), indices.to(device), out)
    assert torch.equal(out.cpu(), uniforms(streams, indices))
    assert torch.equal(uniforms(streams.to(device), indices.to(device)).cpu(), uniforms(streams, indices))


@pytest.mark.parametrize("number", [0.0, 0.5, 1 / 3, 1 - 2**-53])
def test_a_stream_can_be_made_for_a_number(number):
    assert uniforms(torch.tensor([stream_with(number)]), torch.tensor([0])).item() == int(number * 2**53) / 2**53


# Bounds of chi-square with n - 1 degrees of freedom: six standard deviations of sqrt(2 n) around n - 1. Nothing is left
# to chance, because seeds are fixed.
def assert_even(cells: np.ndarray, count: int) -> None:
    """Each of `count` cells is hit equally often."""
    expected = len(cells) / count
    chi_square = ((np.bincount(cells, minlength=count) - expected) ** 2 / expected).sum()
    assert abs(chi_square - (count - 1)) < 6 * (2 * count) ** 0.5


@pytest.mark.parametrize("seeds, indices", [(1, 200_000), (200_000, 1), (500, 400)], ids=["index", "seed", "both"])
def test_uniform(seeds, indices):
    found = numbers(range(seeds), range(indices)).flatten().numpy()
    assert found.min() >= 0 and found.max() < 1
    assert_even((found * 1000).astype(int), 1000)
    assert_even((found * 2**40).astype(int) % 1000, 1000)  # low bits
    assert abs(found.mean() - 0.5) < 6 / (12 * len(found)) ** 0.5


@pytest.mark.parametrize("seed_step, index_step", [(1, 0), (0, 1), (1, 1), (1, -1), (2**32, 0)])
def test_neighbors_are_independent(seed_step, index_step):
    """Pairs of numbers of neighboring seeds and indices fill the unit square evenly."""
    seeds, indices = range(500), range(1, 401)
    first = numbers(seeds, indices).flatten().numpy()
    second = numbers([s + seed_step for s in seeds], [i + index_step for i in indices]).flatten().numpy()
    assert_even((first * 30).astype(int) * 30 + (second * 30).astype(int), 900)
    assert abs(np.corrcoef(first, second)[0, 1]) < 6 / len(first) ** 0.5
