"""Every kernel test runs in Triton's interpreter on the CPU, and natively where it is marked `gpu`."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.fail("the gpu tests need a CUDA device, and this torch sees none")
    return torch.device(request.param)


@pytest.fixture(params=["float32", "float16", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def dtype(request, device) -> torch.dtype:
    """The interpreter's bfloat16 products are wrong, so bfloat16 is for the GPU alone."""
    if request.param == "bfloat16" and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    return getattr(torch, request.param)


def assert_no_worse(got: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor) -> None:
    """Against float64, the worst error of `got` is at most twice that of the plain twin in the same dtype.

    The floor is half a unit in the last place of the largest value: what rounding the exact result itself costs.
    """
    assert got.shape == exact.shape and got.dtype == twin.dtype
    floor = torch.finfo(got.dtype).eps / 2 * exact.abs().max().item()
    error, allowed = ((x.double().cpu() - exact.cpu()).abs().max().item() for x in (got, twin))
    assert error <= 2 * allowed + floor, f"errs by {error:.3g}, the plain twin by {allowed:.3g}"
