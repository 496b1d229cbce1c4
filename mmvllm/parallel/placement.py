"""Which devices each of several engines on this machine has: CUDA devices in turn, or a part of the CPU's threads."""

import os
from dataclasses import dataclass

import torch

from mmvllm.config import EngineConfig
from mmvllm.errors import ArgumentError
from mmvllm.processes.pool import WorkerPool
from mmvllm.processes.worker import NUMBERS_OF_THREADS
from mmvllm.utils.devices import cuda_unusable
from mmvllm.utils.text import counted


@dataclass(frozen=True, slots=True)
class Placement:
    """An engine's `device`, number of threads, and environment, in which its process sees no other devices.

    The environment is that of `begin_engine`.
    """

    device: str
    num_threads: int
    env: dict[str, str]


def place_engines(number: int | str, config: EngineConfig) -> list[Placement]:
    """A place for each engine; "auto" is as many as there are CUDA devices for, or one on a CPU.

    Each engine takes `tensor_parallel_size` devices in turn: of "auto", of those that can be used; of "cuda:N", from
    this one on. On a CPU, each has its part of the threads. Raises ArgumentError for more engines than there are
    devices for, and what `EngineConfig.resolve_device` raises.
    """
    each, devices = config.tensor_parallel_size, _devices(config)
    if number == "auto":
        number = max(1, len(devices) // each)
    if devices and number * each > len(devices):
        raise ArgumentError(
            "{data_parallel_size} {number} with {tensor_parallel_size} {each} needs {needed}; there {found} to use",
            number=number,
            each=each,
            needed=counted(number * each, "CUDA device"),
            found=f"{'is' if len(devices) == 1 else 'are'} {len(devices)}",
        )
    num_threads = max(1, torch.get_num_threads() // number)
    env = dict.fromkeys(NUMBERS_OF_THREADS, str(num_threads))
    if not devices:
        return [Placement("cpu", num_threads, env)] * number
    parts = [devices[i * each : (i + 1) * each] for i in range(number)]
    return [Placement("cuda", num_threads, env | {"CUDA_VISIBLE_DEVICES": ",".join(part)}) for part in parts]


def _devices(config: EngineConfig) -> list[str]:
    """The CUDA devices to use, by the names that CUDA_VISIBLE_DEVICES has for them; none for the CPU."""
    device, number = torch.device("cuda" if config.device == "auto" else config.device), torch.cuda.device_count()
    if device.type == "cpu":
        return []
    if config.device == "auto" and number:
        indices = _usable(number, config.gpu_memory_utilization)
    else:
        indices = [*range(device.index or 0, number)]
    if not indices:
        config.resolve_device()  # warns why it is the CPU, or raises because there is no such device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    names = visible.split(",") if visible else [*map(str, range(number))]
    return [names[i].strip() for i in indices]


def _usable(number: int, memory_share: float) -> list[int]:
    """Asked in a process that ends: whoever asks for a device's free memory takes some of it."""
    pool = WorkerPool(1)
    try:
        return pool.run(_usable_here, number, memory_share)
    finally:
        pool.close()


def _usable_here(number: int, memory_share: float) -> list[int]:
    return [i for i in range(number) if cuda_unusable(i, memory_share) is None]
