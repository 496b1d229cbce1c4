"""Several engines on one machine: which CUDA devices each has, or how many threads."""

import pytest
import torch

from mmvllm.cli.common import option_name
from mmvllm.config import EngineConfig
from mmvllm.errors import ArgumentError
from mmvllm.parallel import placement
from mmvllm.parallel.placement import place_engines


@pytest.fixture
def cards(monkeypatch):
    """A machine with this number of CUDA devices, of which "auto" may use some."""

    def cards(number: int, usable: list[int] | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(placement, "_usable", lambda *_: [*range(number)] if usable is None else usable)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 16)

    return cards


def devices(number: int | str, **options) -> list[str]:
    places = place_engines(number, EngineConfig(**options))
    assert {place.device for place in places} == {"cuda"}
    return [place.env["CUDA_VISIBLE_DEVICES"] for place in places]


def test_engines_take_devices_in_turn(cards):
    cards(8)
    assert devices(3) == ["0", "1", "2"]
    assert devices("auto") == [*"01234567"]
    assert devices("auto", tensor_parallel_size=3) == ["0,1,2", "3,4,5"]
    assert devices(2, tensor_parallel_size=4, device="cuda") == ["0,1,2,3", "4,5,6,7"]
    assert devices("auto", device="cuda:5") == ["5", "6", "7"]
    assert devices(1, device="cuda:5", tensor_parallel_size=2) == ["5,6"]


def test_auto_leaves_out_devices_that_cannot_be_used(cards):
    cards(4, usable=[0, 2, 3])
    assert devices("auto") == ["0", "2", "3"]
    assert devices("auto", tensor_parallel_size=2) == ["0,2"]
    assert devices("auto", device="cuda") == ["0", "1", "2", "3"]


def test_devices_have_the_names_of_the_environment(cards, monkeypatch):
    cards(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-5ab3,7")
    assert devices(3) == ["4", "GPU-5ab3", "7"]


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (3, {}, "--data-parallel-size 3 with --tensor-parallel-size 1 needs 3 CUDA devices; there are 2 to use"),
        (2, {"tensor_parallel_size": 2}, "2 with --tensor-parallel-size 2 needs 4 CUDA devices; there are 2 to use"),
        ("auto", {"tensor_parallel_size": 3}, "with --tensor-parallel-size 3 needs 3 CUDA devices; there are 2 to use"),
        (2, {"device": "cuda:1"}, "2 with --tensor-parallel-size 1 needs 2 CUDA devices; there is 1 to use"),
    ],
)
def test_more_engines_than_there_are_devices_for_are_refused(number, options, message, cards):
    cards(2)
    with pytest.raises(ArgumentError) as refused:
        place_engines(number, EngineConfig(**options))
    assert message in refused.value.format(option_name)


@pytest.mark.parametrize(("number", "want"), [(1, 16), (3, 5), (40, 1), ("auto", 16)])
def test_engines_on_a_cpu_divide_its_threads(number, want, cards):
    cards(0)
    places = place_engines(number, EngineConfig())
    assert len(places) == (1 if number == "auto" else number)
    assert {(place.device, place.num_threads, place.env["OMP_NUM_THREADS"]) for place in places} == {
        ("cpu", want, str(want))
    }
    cards(2)
    assert {place.device for place in place_engines(2, EngineConfig(device="cpu"))} == {"cpu"}


def test_without_a_device_cuda_is_refused(cards):
    cards(0)
    with pytest.raises(ValueError, match="device is 'cuda', but this torch"):
        place_engines(2, EngineConfig(device="cuda"))


@pytest.mark.gpu
def test_usable_devices_are_found_in_a_process_of_their_own():
    assert placement._usable(torch.cuda.device_count(), 0.9)[:1] == [0]
