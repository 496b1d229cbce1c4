"""Load a checkpoint's weights onto the CPU and compare them."""

from pathlib import Path

import torch

from mmvllm.models.registry import load_config
from mmvllm.models.weights import load_model

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32, **options) -> torch.nn.Module:
    return load_model(folder, load_config(folder), CPU, dtype, **options)


def state(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder).state_dict()


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name
