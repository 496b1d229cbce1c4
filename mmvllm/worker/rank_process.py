"""What runs in the process of a rank other than 0: the steps that rank 0 sends, until it ends."""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_uint64
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from mmvllm.errors import first_line
from mmvllm.processes.channel import Channel, SharedBuffer
from mmvllm.processes.ranks import CollectiveError, ConnectedRanks, RanksFailed
from mmvllm.processes.worker import beating, begin_engine
from mmvllm.scheduler.step_inputs import StepInputs
from mmvllm.utils.stopwatch import Stopwatch
from mmvllm.utils.transfer import current_device
from mmvllm.worker.checkpoint import Checkpoint
from mmvllm.worker.device_errors import is_out_of_memory
from mmvllm.worker.loading import load_runner
from mmvllm.worker.model_runner import ModelRunner

CONNECT_TIMEOUT = timedelta(minutes=5)  # for all processes to begin


@dataclass(frozen=True, slots=True)
class Report:
    """How loading or a step went; nothing is wrong without an `error`."""

    error: str | None = None
    is_out_of_memory: bool = False


def rank_device(first: torch.device, rank: int) -> torch.device:
    """The device of `rank`: the GPU of rank 0 plus `rank`, or the CPU, which all ranks share."""
    return first if first.type == "cpu" else torch.device(first.type, (first.index or 0) + rank)


def begun(rank: int) -> str:
    """The key of the store that says that a rank is about to connect: rank 0 connects when all are."""
    return f"begun/{rank}"


def run_rank(pipe: Connection, *arguments: Any) -> None:
    """What a process does; see `serve_rank`."""
    begin_engine({})
    logging.getLogger("mmvllm").setLevel(logging.ERROR)  # rank 0 has the same warnings
    serve_rank(pipe, *arguments)


def serve_rank(
    pipe: Connection,
    buffers: Sequence[SharedBuffer | None],
    pulse: c_uint64,
    checkpoint: Checkpoint,
    rank: int,
    port: int,
    num_threads: int,
) -> None:
    """Load the rank's part of the model, then run steps; rank 0 has the store at this port of this machine."""
    torch.set_num_threads(num_threads)
    channel, device = Channel(pipe, *buffers), rank_device(checkpoint.device, rank)
    size = checkpoint.config.tensor_parallel_size
    try:
        with beating(pulse), current_device(device):
            store = dist.TCPStore("127.0.0.1", port, size, False, CONNECT_TIMEOUT)
            store.set(begun(rank), "")
            runner = load_runner(checkpoint, device, ConnectedRanks.connect(store, rank, size, device))
            pipe.send(Report())
            _follow(channel, runner)
    except Exception as error:
        if isinstance(error, CollectiveError) or not isinstance(error, RanksFailed):  # else rank 0 knows who has ended
            with suppress(OSError):
                pipe.send(_report(rank, error))
        sys.exit(1)


@torch.inference_mode()
def _follow(channel: Channel, runner: ModelRunner) -> None:
    while (message := _next_message(channel)) is not None:
        if isinstance(message, StepInputs):
            channel.pipe.send(_run_step(runner, message))
        else:
            message(runner)


def _next_message(channel: Channel) -> StepInputs | Callable[[ModelRunner], None] | None:
    """A step; or what is to be done with the runner; None if this rank is to end, or if rank 0 has ended."""
    try:
        return channel.receive()
    except (EOFError, OSError):
        return None


def _run_step(runner: ModelRunner, inputs: StepInputs) -> Report:
    try:
        runner.run(inputs, Stopwatch(runner.device, None))
        runner.append(torch.empty(inputs.samples.shape[1], dtype=torch.int64, device=runner.device))
        return Report()
    except RanksFailed:
        raise
    except (RuntimeError, MemoryError) as error:
        return _report(runner.ranks.rank, error.with_traceback(None))  # a traceback would hold the tensors
    finally:
        runner.ranks.complete()


def _report(rank: int, error: Exception) -> Report:
    return Report(f"rank {rank}: {first_line(error)}", is_out_of_memory(error))
