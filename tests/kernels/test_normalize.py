import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmvllm.kernels.normalize import normalize, normalize_torch, normalize_triton
from mmvllm.models.vision_language import IMAGE_DEFAULTS

SIZES = pytest.mark.parametrize("P,n", [(1, 392), (5, 392), (6, 512), (700, 2), (3, 1), (9, 683)])


@pytest.mark.parametrize("run", [normalize, normalize_triton, normalize_torch])
@SIZES
def test_every_value_is_that_of_its_channels_table(run, P, n, device, dtype):
    torch.manual_seed(0)
    patches = torch.randint(0, 256, (P, 3 * n), dtype=torch.uint8)
    table = torch.randn(3, 256).to(dtype)
    want = torch.stack([table[k][patches.view(P, 3, n)[:, k].long()] for k in range(3)], dim=1).view(P, 3 * n)
    assert torch.equal(run(patches.to(device), table.to(device)).cpu(), want)


@pytest.mark.parametrize("run", [normalize, normalize_triton])
def test_extreme_levels_of_every_channel(run, device, dtype):
    patches = torch.tensor([[0, 255] * 3, [255, 0] * 3], dtype=torch.uint8, device=device)
    table = torch.arange(3 * 256, device=device).view(3, 256).to(dtype)
    ends = table[:, [0, 255]]
    assert torch.equal(run(patches, table), torch.stack([ends.flatten(), ends.flip(1).flatten()]))


class Recorded(TorchDispatchMode):
    """The operations that torch is given."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_the_reference_neither_waits_for_a_device_nor_copies_constants_to_it():
    table = IMAGE_DEFAULTS.pixel_table().to("meta")
    patches = torch.empty(4, 1176, dtype=torch.uint8, device="meta")
    with Recorded() as recorded:
        normalize_torch(patches, table)
    assert "index_select" in recorded.names
    assert not {"nonzero", "_local_scalar_dense", "lift_fresh", "index"} & {*recorded.names}
