"""`device="auto"`: the first GPU that the engine can use, or the CPU with a sentence that says why."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from mmvllm import EngineConfig
from mmvllm.cli.main import main

GiB = 2**30


@dataclass
class Card:
    name: str
    capability: tuple[int, int] = (9, 0)
    free: int = 70 * GiB
    total: int = 80 * GiB
    error: str | None = None


H100 = Card("H100")
T4 = Card("T4", (7, 5), 14 * GiB, 15 * GiB)
FULL = Card("H100", free=2 * GiB)
BROKEN = Card("H100", error="CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors ...")


@pytest.fixture
def cards(monkeypatch):
    """Make torch see these GPUs."""

    def see(*cards: Card) -> None:
        def memory(index: int) -> tuple[int, int]:
            if cards[index].error:
                raise RuntimeError(cards[index].error)
            return cards[index].free, cards[index].total

        def properties(index: int) -> SimpleNamespace:
            return SimpleNamespace(name=cards[index].name, total_memory=cards[index].total)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: cards[index].capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", memory)

    return see


@pytest.mark.parametrize(
    ("seen", "device"),
    [
        ([], "cpu"),
        ([H100], "cuda"),
        ([H100, T4], "cuda"),
        ([T4, H100], "cuda:1"),
        ([FULL, BROKEN, H100], "cuda:2"),
    ],
    ids=str,
)
def test_auto_is_the_first_gpu_that_can_be_used(seen, device, cards, caplog):
    cards(*seen)
    assert EngineConfig().resolve_device() == torch.device(device)
    assert EngineConfig(device="cpu").resolve_device() == torch.device("cpu")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        (T4, "cuda:0 has compute capability 7.5, below 8.0"),
        (FULL, "cuda:0 has 2.0 of 80.0 GiB free, of which the engine may use none"),
        (BROKEN, "cuda:0 cannot be used: CUDA error: all CUDA-capable devices are busy or unavailable"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_auto_is_the_cpu_if_no_gpu_can_be_used(card, reason, cards, caplog, capsys):
    cards(card)
    assert EngineConfig().resolve_device() == torch.device("cpu")
    assert caplog.messages == [f"running on the CPU: {reason}"]
    assert EngineConfig(device="cuda").resolve_device() == torch.device("cuda")  # whoever names it gets it
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"not taken by --device auto: {reason.removeprefix('cuda:0 ')}\n" in out and "float32 on cpu" in out


def test_the_share_of_memory_decides(cards):
    cards(FULL)
    assert EngineConfig(gpu_memory_utilization=0.99).resolve_device() == torch.device("cuda")


def test_amd_gpus_are_left_out(cards, monkeypatch, caplog):
    cards(H100)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert EngineConfig().resolve_device() == torch.device("cpu")
    assert caplog.messages == ["running on the CPU: cuda:0 is an AMD GPU, which is not supported"]


@pytest.mark.parametrize(("module", "name"), [(torch.backends.mps, "mps"), (torch.xpu, "xpu")])
def test_accelerators_that_are_not_supported_are_named(module, name, cards, monkeypatch, caplog, capsys):
    cards()
    monkeypatch.setattr(module, "is_available", lambda: True)
    assert EngineConfig().resolve_device() == torch.device("cpu")
    assert caplog.messages == [f"running on the CPU: {name} is not supported"]
    assert main(["info"]) == 0
    assert f"  {name:<16} not supported\n" in capsys.readouterr().out
