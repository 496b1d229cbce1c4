"""Sampling compared with its reference and with the definition in float64: filters, edge cases, distribution."""

import pytest
import torch
from torch import Tensor

from mmvllm.kernels.common.uniforms import stream_of, uniforms
from mmvllm.kernels.sampling import sample, sample_torch, sample_triton
from tests.helpers.models.sampling import every_row, row_params

INF = float("inf")


def make_rows(count: int, V: int) -> Tensor:
    """Random logits; in every four rows one has ties and one is half -inf; every eighth row is uniform."""
    generator = torch.Generator().manual_seed(V)
    logits = 3 * torch.randn(count, V, generator=generator)
    logits[1::4] = logits[1::4].round()
    logits[2::4, ::2] = -INF
    logits[2::4, V // 2] = 1.0
    logits[3::8] = 0.0
    return logits


def make_params(count: int, V: int) -> dict[str, Tensor]:
    """Random combinations of filters, enabled and disabled, and uniforms."""
    generator = torch.Generator().manual_seed(V + 1)
    choices = {
        "temperature": [0.0, 1e-30, 0.5, 1.0, 1.0, 4.0, 1e30],
        "top_k": [1, min(3, V), V // 3 + 1, V, V],
        "top_p": [1e-50, 0.3128, 0.8735, 0.9813, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.0, 1e-30, 0.07, 1.0],
    }
    params = {
        name: torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]
        for name, values in choices.items()
    }
    return params | {"uniform": torch.rand(count, generator=generator)}


def draw(logits: Tensor, block: int, **setting) -> Tensor:
    """Tokens (R,) of the kernel, of sequences with these parameters and random numbers."""
    R, V = logits.shape
    return sample_triton(logits, row_params(R, V, device=logits.device, **setting), *every_row(R, logits.device), block)


def define(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> tuple[int, Tensor]:
    """The token of one row (V,) and the probabilities it was drawn from, in float64; token -1 where rounding decides.

    Both results are right there in float32: within 1e-6 of a sum of probabilities, or within the rounding of a logit.
    """
    if temperature == 0:
        return logits.argmax().item(), torch.eye(len(logits), dtype=torch.float64)[logits.argmax()]
    temperature = min(max(temperature, 1e-6), 1e6)
    logits = logits.double()
    largest = logits.max()
    less_likely = logits < largest  # all others pass every filter
    weights = ((logits - largest) / temperature).exp()
    edges = [logits.sort(descending=True).values[top_k - 1]]
    kept = logits >= edges[0]
    distances = []
    if top_p < 1:
        values, places = logits.unique(return_inverse=True)
        masses = torch.zeros(len(values), dtype=torch.float64).index_add(0, places, weights * kept)
        above = (masses.flip(0).cumsum(0).flip(0) - masses)[places] / masses.sum()
        distances += [(above - top_p)[less_likely]]
        kept &= (above < top_p) | ~less_likely
        edges += [logits[kept].min()]
    edges += [largest + temperature * torch.tensor(min_p).double().log()]
    kept &= (logits >= edges[-1]) | ~less_likely
    probs = weights * kept / (weights * kept).sum()
    cumulative = probs.cumsum(0)
    distances += [(cumulative - uniform)[probs > 0]]
    token = (cumulative <= uniform).sum().item()
    gaps = torch.stack([(logits - edge).abs() for edge in edges])
    unclear = ((gaps > 0) & (gaps < 5e-7 * max(1, abs(largest)))).any() or torch.cat(distances).abs().min() < 1e-6
    return -1 if unclear else token, probs


@pytest.mark.slow
@pytest.mark.thinned(2)
@pytest.mark.parametrize("V, block, count", [(1, 16, 10), (7, 16, 64), (1000, 512, 40), (5003, 2048, 24)])
def test_tokens_equal_those_of_the_reference_and_of_the_definition(device, V, block, count):
    if device.type == "cuda":
        block, count = 8192 if V > 1000 else block, 2000
    wide = torch.full((count, V + 3), INF, device=device)
    logits = wide[:, :V]  # strided rows, followed by values that are not logits
    logits.copy_(make_rows(count, V))
    params = make_params(count, V)
    rows, ends = every_row(count, device)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))  # of the rows of parameters
    packed = row_params(count, V, **{name: x[order.argsort()] for name, x in params.items()}, device=device)
    rows = order.to(device, torch.int32)
    before = logits.clone()
    got = sample_triton(logits, packed, rows, ends, block=block).cpu()
    assert torch.equal(logits, before)
    reference = sample_torch(logits, packed, rows, ends).cpu()
    settings = zip(*(x.tolist() for x in params.values()), strict=True)
    want = torch.tensor([define(row, *setting)[0] for row, setting in zip(before.cpu(), settings, strict=True)])
    clear = want >= 0
    assert clear.float().mean() > 0.85
    assert torch.equal(reference[clear], want[clear])
    assert torch.equal(got[clear], want[clear])


@pytest.mark.slow
@pytest.mark.thinned(2)
@pytest.mark.parametrize("filters", [{}, {"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.8}], ids=str)
def test_evenly_spread_uniforms_give_the_distribution(device, filters):
    """Each token is drawn in proportion to its probability, up to one draw."""
    V, count = 40, 24 if device.type == "cpu" else 20000
    logits = make_rows(3, V)[2]
    setting = {"temperature": 1.5, "top_k": V, "top_p": 1.0, "min_p": 0.0} | filters
    uniform = (torch.arange(count) + 0.5) / count
    tokens = draw(logits.expand(count, V).to(device), 32, uniform=uniform, **setting).cpu()
    probs = define(logits, **setting, uniform=0.5)[1]
    drawn = torch.bincount(tokens, minlength=V)
    assert not drawn[probs == 0].any()
    assert (drawn - count * probs).abs().max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24, 1 - 2**-53], ids=["zero", "one-in-float32", "one-in-float64"])
def test_extreme_uniforms_draw_the_first_and_the_last_possible_token(device, uniform):
    """The tokens around them are impossible: -inf, filtered out, or too unlikely for float32."""
    R, V = 10, 100
    logits = torch.full((R, V), -INF)
    logits[:, 20:71] = make_rows(R, V)[:, 20:71].clamp(min=-9.0)
    logits[1:5] = -200.0
    logits[1:5, [20, 40, 70]] = torch.tensor([1.0, 2.0, 1.0])
    logits[2:5, 5], logits[2:5, 90] = 0.5, -1.0
    top_k, top_p, min_p = torch.full((R,), V), torch.ones(R), torch.zeros(R)
    top_k[2], top_p[3], min_p[4] = 3, 0.8, 0.3
    setting = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "uniform": uniform}
    assert draw(logits.to(device), 16, **setting).tolist() == [70 if uniform else 20] * R
    assert sample_torch(logits, row_params(R, V, **setting), *every_row(R)).tolist() == [70 if uniform else 20] * R


@pytest.mark.slow
def test_adjacent_tokens_have_adjacent_intervals(device):
    V = 32
    logits = torch.zeros(V, V, device=device)
    starts = torch.arange(V) / V
    ends = starts.double() + 1 / V - 2**-40
    for uniform in (starts, ends):
        assert draw(logits, 8, uniform=uniform).tolist() == [*range(V)]


@pytest.mark.slow
def test_top_k_distinguishes_adjacent_floats(device):
    """A uniform of almost 1 draws the last of decreasing logits that is kept."""
    logits = torch.tensor([1.5, 1.0, 0.0, -1.0, -1.5])
    below = torch.nextafter(logits, torch.tensor(-INF))
    logits = torch.stack([logits, below, torch.nextafter(below, torch.tensor(-INF))], dim=1)
    logits[2, 1:] = torch.tensor([-1e-30, -2e-30])  # neighbors of 0 are subnormal, which a GPU may flush to 0
    V = logits.numel()
    logits = logits.flatten().expand(V, V).to(device)
    assert draw(logits, 16, top_k=torch.arange(1, V + 1), uniform=1 - 2**-24).tolist() == [*range(V)]


def test_top_p_keeps_a_long_flat_tail(device):
    """Each token is a thousand times less likely than 1 - top_p, but all are needed to reach top_p."""
    V, probability = 1000, 1.1e-5
    logits = torch.full((1, V), probability).log()
    logits[0, 5] = 0.0
    assert draw(logits.to(device), 1024, top_p=0.99, uniform=1 - 2**-24).tolist() == [V - 1]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_rows_have_no_token_and_do_not_affect_others(temperature, device):
    V = 100
    logits = make_rows(5, V)
    logits[0], logits[1], logits[2, 50], logits[3, 50] = -INF, float("nan"), float("nan"), INF
    setting = {"temperature": temperature, "top_k": 10, "top_p": 0.9, "min_p": 0.01, "uniform": 0.4}
    want = [-1, -1, -1, -1, define(logits[4], **setting)[0]]
    assert draw(logits.to(device), 64, **setting).tolist() == want
    assert sample_torch(logits, row_params(5, V, **setting), *every_row(5)).tolist() == want


def test_numbers_are_those_of_stream_and_index(device):
    """The number says which of V equally likely tokens is drawn."""
    V, indices = 1000, torch.tensor([0, 1, 2, 1000, 10**6])
    streams = torch.tensor([stream_of(seed) for seed in (0, 1, 2**64 - 1, 2**63, 7)])
    params = row_params(5, V, stream=streams, num_prompt_tokens=30, device=device)
    rows, ends = every_row(5, device)[0], (indices + 30).to(device, torch.int32)
    want = (uniforms(streams, indices) * V).long().tolist()
    logits = torch.zeros(5, V, device=device)
    for draw_tokens in (sample, sample_torch, sample_triton):
        assert draw_tokens(logits, params, rows, ends).tolist() == want


@pytest.mark.slow
def test_logits_of_bfloat16_are_sampled_as_in_float32(device):
    logits = make_rows(24, 500).bfloat16().to(device)
    params = row_params(24, 500, **make_params(24, 500), device=device)
    want = sample_torch(logits.float(), params, *every_row(24, device))
    assert torch.equal(sample_torch(logits, params, *every_row(24, device)), want)
    got = sample_triton(logits, params, *every_row(24, device), block=256)
    assert torch.equal(got, sample_triton(logits.float(), params, *every_row(24, device), block=256))
    assert (got != want).sum() <= 2  # where rounding decides
