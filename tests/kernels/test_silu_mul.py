import pytest
import torch

from mmvllm.kernels.silu_mul import silu_mul, silu_mul_torch, silu_mul_triton
from tests.helpers.models.kernels import assert_no_worse


@pytest.mark.thinned(3)
@pytest.mark.parametrize("N,width", [(1, 8960), (3, 1024), (5, 1027), (4, 7), (33, 64)])
def test_error_is_bounded_by_the_reference(N, width, device, dtype):
    torch.manual_seed(0)
    gate_up = 3 * torch.randn(N, 2 * width, device=device, dtype=dtype)
    got = silu_mul_triton(gate_up)
    assert_no_worse(got, silu_mul_torch(gate_up), silu_mul_torch(gate_up.double()))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_the_gate_comes_first_and_saturates(device, dtype):
    gate_up = torch.tensor([[0, 500, -500, 2, 3, 5]], device=device, dtype=dtype)
    for gate in (silu_mul, silu_mul_triton):
        torch.testing.assert_close(gate(gate_up), torch.tensor([[0, 1500, 0]], device=device, dtype=dtype))
