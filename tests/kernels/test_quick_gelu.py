import pytest
import torch

from mmvllm.kernels.quick_gelu import quick_gelu, quick_gelu_torch, quick_gelu_triton
from tests.helpers.models.kernels import assert_no_worse


@pytest.mark.parametrize("shape", [(4, 5120), (2048,), (3, 5, 137), (1,)])
def test_error_is_bounded_by_the_reference(shape, device, dtype):
    torch.manual_seed(0)
    x = 3 * torch.randn(shape, device=device, dtype=dtype)
    assert_no_worse(quick_gelu_triton(x), quick_gelu_torch(x), quick_gelu_torch(x.double()))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_saturates(device, dtype):
    x = torch.tensor([0, 500, -500], device=device, dtype=dtype)
    for activate in (quick_gelu, quick_gelu_triton):
        torch.testing.assert_close(activate(x), x.relu())
