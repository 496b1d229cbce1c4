"""Products with weights in codes of 4 and 8 bits, against float64, with NaN and other codes around what may be read."""

import pytest
import torch

from mmvllm.kernels import quantized_linear as file
from mmvllm.kernels.common.dispatch import KernelShapes, supports_fp8
from mmvllm.kernels.fp8 import E4M3
from mmvllm.kernels.quantized_linear import (
    pack_int4,
    quantized_linear,
    quantized_linear_torch,
    quantized_linear_triton,
    supports_groups,
    unpack_int4,
)
from tests.helpers.models.kernels import assert_no_worse

pytestmark = pytest.mark.thinned

WIDTHS = pytest.mark.parametrize("bits", [4, 8])
SIZES = pytest.mark.parametrize(
    ("out_size", "in_size", "group"),
    [(70, 256, 128), (64, 128, 64), (131, 96, 32), (40, 48, 48), (33, 67, 67), (20, 300, 300)],
)


def arguments(N, out_size, in_size, group, bits, device, dtype, has_zeros=True, has_bias=True):
    torch.manual_seed(0)
    qweight = torch.randint(0, 16, (out_size, in_size)) if bits == 4 else torch.randint(-128, 128, (out_size, in_size))
    qweight = qweight.to(device, torch.uint8 if bits == 4 else torch.int8)
    scales = (torch.rand(in_size // group, out_size, device=device) + 0.1).half().t()
    zeros = qweight[:, ::group].t().contiguous().t() if has_zeros else None
    bias = 100 * torch.randn(out_size, device=device).to(dtype) if has_bias else None
    x = torch.randn(N, in_size, device=device).to(dtype)
    return x, pack_int4(qweight) if bits == 4 else qweight, scales, zeros, bias


def exact_product(x, qweight, scales, zeros, bias):
    """The definition, in float64."""
    qweight = unpack_int4(qweight, x.shape[1]) if qweight.dtype == torch.uint8 else qweight
    groups = range(scales.shape[1])
    columns = torch.arange(x.shape[1]) // (x.shape[1] // len(groups))
    zero = 0 if zeros is None else zeros.double()[:, columns]
    product = x.double() @ ((qweight.double() - zero) * scales.double()[:, columns]).T
    return product if bias is None else product + bias


def in_float32(x, qweight, scales, zeros, bias):
    """What no product with a rounded weight reaches: everything in float32, rounded once."""
    bias = None if bias is None else bias.float()
    return quantized_linear_torch(x.float(), qweight, scales, zeros, bias).to(x.dtype)


def assert_accurate(given):
    exact = exact_product(*given)
    for function in (quantized_linear, quantized_linear_triton):
        assert_no_worse(function(*given), quantized_linear_torch(*given), exact)
    assert_no_worse(quantized_linear_triton(*given), in_float32(*given), exact)


@pytest.mark.thinned(2)
@WIDTHS
@SIZES
@pytest.mark.parametrize("N", [1, 5, 17])
def test_error_is_bounded_by_that_of_a_product_in_float32(N, out_size, in_size, group, bits, device, dtype):
    assert_accurate(arguments(N, out_size, in_size, group, bits, device, dtype))


@pytest.mark.slow
@WIDTHS
@pytest.mark.parametrize("N", [33, 64, 129, 200])
def test_larger_tiles(N, bits, device):
    assert_accurate(arguments(N, 130, 256, 128, bits, device, torch.float16))


def test_groups_of_a_tile_at_least(device, dtype):
    """Sharding may leave smaller groups than the checkpoint has."""
    assert_accurate(arguments(3, 40, 80, 16, 8, device, dtype))
    possible = {(bits, group) for bits in (4, 8) for group in (8, 16, 32, 96) if supports_groups(bits, 96, 96 // group)}
    assert possible == {(8, 16), (4, 32), (8, 32), (4, 96), (8, 96)}


@WIDTHS
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_zeros_and_bias_may_be_missing(has_zeros, has_bias, bits, device, dtype):
    assert_accurate(arguments(3, 40, 64, 32, bits, device, dtype, has_zeros, has_bias))


@WIDTHS
def test_scales_may_have_any_dtype_and_strides(bits, device, dtype):
    x, qweight, scales, zeros, bias = arguments(3, 40, 128, 32, bits, device, dtype)
    want = quantized_linear_triton(x, qweight, scales, zeros, bias)
    rows = quantized_linear_triton(x, qweight, scales.float().contiguous(), zeros.contiguous(), bias)
    assert torch.equal(rows, want)


@pytest.mark.thinned(1)
@WIDTHS
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_splits_are_added_in_their_order(splits, bits, device, dtype, monkeypatch):
    """Also a number of splits that does not divide that of the tiles, in two calls: the counts are reset."""
    monkeypatch.setattr(file, "num_splits", lambda *_: splits)
    given = arguments(3, 70, 384, 128, bits, device, dtype)
    first = quantized_linear_triton(*given)
    assert_no_worse(first, in_float32(*given), exact_product(*given))
    assert torch.equal(quantized_linear_triton(*given), first)


@WIDTHS
def test_nothing_around_the_arguments_is_read(bits, device, dtype):
    """Rows and columns of tiles that do not exist would be NaN or make the result another one."""
    given = arguments(5, 33, 96, 32, bits, device, dtype)
    want = quantized_linear_triton(*given)

    def surrounded(x):
        fill = torch.nan if x.is_floating_point() else 7
        around = torch.full((x.numel() + 512,), fill, device=device, dtype=x.dtype)
        view = around[256:-256].as_strided(x.shape, x.stride())
        view.copy_(x)
        return view

    assert torch.equal(quantized_linear_triton(*map(surrounded, given)), want)


@pytest.mark.slow
@WIDTHS
@pytest.mark.parametrize("numbers", [(1, 9, 16), (33, 50)])
def test_rows_do_not_depend_on_others_of_the_same_tiles(numbers, bits, device, dtype):
    x, *rest = arguments(max(numbers), 70, 256, 128, bits, device, dtype)
    want = quantized_linear_triton(x, *rest)
    for number in numbers:
        assert torch.equal(quantized_linear_triton(x[-number:].contiguous(), *rest), want[-number:])


@pytest.mark.parametrize("in_size", [1, 16, 31, 32, 33, 100])
def test_packed_codes_are_unpacked_to_the_same(in_size, device):
    qweight = torch.randint(0, 16, (5, in_size), dtype=torch.uint8, device=device)
    packed = pack_int4(qweight)
    assert packed.shape == (5, -(-in_size // 32) * 16) and packed.is_contiguous()
    assert torch.equal(unpack_int4(packed, in_size), qweight)


def test_columns_of_a_byte_are_16_apart():
    qweight = torch.zeros(1, 64, dtype=torch.uint8)
    qweight[0, [0, 17, 47, 63]] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    want = [0] * 32
    want[0], want[1], want[31] = 1, 2 << 4, 3 | 4 << 4
    assert pack_int4(qweight).tolist() == [want]


def test_codes_may_be_8_bit_floats(device, dtype):
    if not supports_fp8(device):
        pytest.skip("needs a GPU with 8-bit floats")
    x, _, scales, _, bias = arguments(5, 70, 256, 128, 8, device, dtype)
    qweight = torch.randn(70, 256, device=device).clamp(0.1).to(E4M3)  # the interpreter drops bits of subnormal values
    given = x, qweight, scales, None, bias
    assert_no_worse(quantized_linear_triton(*given), in_float32(*given), exact_product(*given))


def test_no_rows(device, dtype):
    given = arguments(0, 8, 32, 32, 4, device, dtype)
    for product in (quantized_linear, quantized_linear_triton):
        assert product(*given).shape == (0, 8)


def test_cases_are_valid():
    shapes = KernelShapes(2, 1, 8, hidden_size=128, intermediate_size=256, vocab_size=9, vision=None, experts=None)
    found = list(file.cases(shapes, torch.device("cpu"), torch.float32))
    assert [case.label for case in found][::8] == ["4 bits, N=1 128->512", "4 bits, N=1 256->128"]
    assert all(quantized_linear_torch(*case.args).isfinite().all() for case in found)


@pytest.mark.gpu
@WIDTHS
@pytest.mark.parametrize("N", [1, 24])
def test_replays_of_a_cuda_graph_follow_the_inputs(N, bits):
    x, *rest = arguments(N, 1536, 8960, 128, bits, torch.device("cuda"), torch.bfloat16)
    quantized_linear(x, *rest)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantized_linear(x, *rest)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, quantized_linear(x, *rest))
