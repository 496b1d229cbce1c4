"""Every kernel test runs in Triton's interpreter on the CPU, and natively if marked `gpu`."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.fail("the gpu tests need a CUDA device, but this torch finds none")
    return torch.device(request.param)


@pytest.fixture(params=["float32", "float16", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def dtype(request, device) -> torch.dtype:
    """bfloat16 is tested on the GPU only, because its products are wrong in the interpreter."""
    if request.param == "bfloat16" and device.type == "cpu":
        pytest.skip("bfloat16 products are wrong in Triton's interpreter")
    return getattr(torch, request.param)
