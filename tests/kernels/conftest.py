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
