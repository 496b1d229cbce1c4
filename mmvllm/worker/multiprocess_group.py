"""The other ranks of an engine: processes that run the steps of rank 0.

    rank 0: schedule, pack ── StepInputs, each item's patches to one rank ──> run ── report ──> rank 0: commit
               └── run ── sample ── tokens, broadcast ──────────────────────> append

Rank 0 alone has the scheduler and the sampler. Messages go through pipes, their large arrays through shared memory.
On a CPU, ranks share the threads of their machine.
"""

import atexit
import multiprocessing
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Set
from contextlib import suppress
from ctypes import c_uint64
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist

from mmvllm.models.splitting import rank_config
from mmvllm.processes.channel import Channel, PackedMessage, SharedBuffer
from mmvllm.processes.ranks import SINGLE, TIMEOUT, ConnectedRanks, RanksFailed
from mmvllm.processes.signals import signals_deferred
from mmvllm.processes.start import start_process
from mmvllm.processes.watchdog import Watched, first_lost, new_pulse
from mmvllm.scheduler.step_inputs import StepInputs
from mmvllm.utils.transfer import current_device
from mmvllm.worker.checkpoint import Checkpoint
from mmvllm.worker.loading import load_runner
from mmvllm.worker.model_runner import ModelRunner
from mmvllm.worker.rank_process import CONNECT_TIMEOUT, Report, begun, rank_device, run_rank
from mmvllm.worker.worker_group import WorkerGroup

NUM_BUFFERS = 4  # of steps without a report: one that runs, one launched ahead, and those that were interrupted
EXIT_SECONDS = 5.0  # for a process to end by itself
REASON_SECONDS = 2.0  # for the system to tell that a process has ended
POLL_SECONDS = 0.02


class ThreadShares:
    """How many threads torch computes with in this process while ranks in other processes share the CPU.

    Of the shares of several engines the smallest counts; once none is left, this process has all threads again.
    """

    def __init__(self):
        self._lock, self._whole, self._shares = threading.Lock(), 0, []

    def take(self, num_ranks: int) -> int:
        """The threads of each rank of an engine, from now on of this process too."""
        with self._lock:
            self._whole = self._whole if self._shares else torch.get_num_threads()
            self._shares.append(max(1, self._whole // num_ranks))
            torch.set_num_threads(min(self._shares))
            return self._shares[-1]

    def give_back(self, share: int) -> None:
        """An engine has ended."""
        with self._lock:
            self._shares.remove(share)
            torch.set_num_threads(min(self._shares, default=self._whole))


THREAD_SHARES = ThreadShares()


def start_runner(checkpoint: Checkpoint) -> ModelRunner:
    """Load the model, with the other ranks if there are several; raises ValueError for what cannot be served."""
    size = checkpoint.config.tensor_parallel_size
    rank_config(checkpoint.model_config, size)  # refuses sizes before anything is started
    if size == 1:
        return load_runner(checkpoint, checkpoint.device, SINGLE)
    worker_group = MultiprocessGroup(checkpoint)
    try:
        with current_device(checkpoint.device):
            runner = load_runner(checkpoint, checkpoint.device, worker_group.connect(), worker_group)
            worker_group.wait_until_ready()
        return runner
    except BaseException as error:
        explained = worker_group.explained(error)
        worker_group.kill()
        raise explained from (None if explained is not error else error.__cause__)


@dataclass(slots=True)
class _Sent:
    """A step that the other ranks run."""

    digests: list[bytes]  # of the items that it encodes
    reports: list[Report] = field(default_factory=list)  # of the first ranks


class MultiprocessGroup(WorkerGroup):
    """Starts the other ranks and watches them: if one ends, nothing can be computed any more."""

    def __init__(self, checkpoint: Checkpoint):
        super().__init__()
        self._device, self._size = checkpoint.device, checkpoint.config.tensor_parallel_size
        self._ranks: ConnectedRanks | None = None
        self._sent: deque[_Sent] = deque()
        self._doubtful: set[bytes] = set()  # items that another rank may lack, because a step failed there
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_exiting = threading.Event()
        self._processes: list[multiprocessing.Process] = []
        self._channels: list[Channel] = []
        share = THREAD_SHARES.take(self._size) if self._device.type == "cpu" else None
        self._num_threads = share or max(1, torch.get_num_threads() // self._size)  # of each rank
        watched: list[Watched] = []
        arguments = weakref.ref(self), watched, checkpoint.config.step_timeout, self._is_exiting
        watcher = threading.Thread(target=_watch, args=arguments, daemon=True)
        # At exit this must run before multiprocessing's own handler, which was registered first and would wait.
        self._kill = weakref.finalize(self, _kill_all, self._processes, self._is_exiting, watcher, share)
        atexit.register(self._kill)
        try:
            for rank in range(1, self._size):
                pulse = new_pulse()
                process = self._start(checkpoint, rank, pulse)
                watched.append(Watched(f"the process of rank {rank}", process, pulse))
        except BaseException:
            self._kill()
            raise
        watcher.start()

    def _start(self, checkpoint: Checkpoint, rank: int, pulse: c_uint64) -> multiprocessing.Process:
        pipe, theirs = multiprocessing.Pipe()
        buffers = [SharedBuffer.create() for _ in range(NUM_BUFFERS)]
        buffers = [] if None in buffers else buffers  # fewer would be overwritten before they are read
        port = self._listener.getsockname()[1]
        process = _start_process(theirs, buffers, pulse, checkpoint, rank, port, self._num_threads)
        self._processes.append(process)
        self._channels.append(Channel(pipe, *buffers))
        theirs.close()
        return process

    def connect(self) -> ConnectedRanks:
        """Wait until all ranks are connected; raises RanksFailed if one ends before."""
        port = self._listener.getsockname()[1]
        store = dist.TCPStore(
            *("127.0.0.1", port, self._size, True, CONNECT_TIMEOUT),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        self._wait(lambda: not store.check([begun(rank) for rank in range(1, self._size)]))
        connected: list[ConnectedRanks | Exception] = []
        arguments = (store, rank_device(self._device, 0), self._size, connected)
        # Connecting waits for all ranks, even for one that has ended meanwhile.
        thread = threading.Thread(target=_connect, args=arguments, daemon=True)
        thread.start()
        self._wait(thread.is_alive)
        if isinstance(connected[0], Exception):
            raise RanksFailed(f"the ranks could not be connected: {connected[0]}")
        self._ranks = connected[0]
        self.check()  # one that ended before this was set could not abort it
        return self._ranks

    def _wait(self, is_going_on: Callable[[], bool]) -> None:
        """Raises RanksFailed if a process ends before, or if this takes too long."""
        end = time.monotonic() + CONNECT_TIMEOUT.total_seconds()
        while is_going_on():
            self.check()
            if time.monotonic() > end:
                raise RanksFailed(f"the ranks could not be connected within {CONNECT_TIMEOUT}")
            time.sleep(POLL_SECONDS)

    def wait_until_ready(self) -> None:
        """Wait for the reports of all ranks; raises RuntimeError if one could not be loaded."""
        self._sent.append(_Sent([]))
        self.confirm()

    def send(self, inputs: StepInputs) -> None:
        messages = _messages(inputs, self._size)  # all, before one is sent: packing may run out of memory
        for sent in list(self._sent)[: 1 - NUM_BUFFERS]:
            self._read_reports(sent)
        try:
            for channel, message in zip(self._channels, messages, strict=True):
                channel.send_packed(message)
        except OSError as error:
            raise RanksFailed(f"a rank cannot be reached: {error}") from None
        self._sent.append(_Sent([item.digest for item in inputs.new_mm_items]))

    def confirm(self) -> None:
        self._read_reports(self._sent[0])
        failed = [report for report in self._sent[0].reports if report.error is not None]
        if failed:
            # All ranks take back a step that is too large for one of them; `settle` forgets it.
            raise (torch.OutOfMemoryError if failed[0].is_out_of_memory else RuntimeError)(failed[0].error)
        self._sent.popleft()

    def settle(self) -> None:
        while self._sent:
            self._read_reports(self._sent[0])
            # Of a step that failed here, other ranks have zeros without an error.
            self._doubtful.update(self._sent[0].digests)
            self._sent.popleft()

    def _read_reports(self, sent: _Sent) -> None:
        """Those that are missing; an interrupt between two of them loses none."""
        try:
            for channel in self._channels[len(sent.reports) :]:
                if not channel.pipe.poll(TIMEOUT.total_seconds()):
                    raise RanksFailed("a rank did not finish a step in time")
                with signals_deferred():
                    sent.reports.append(channel.pipe.recv())
        except (EOFError, OSError) as error:
            raise RanksFailed(f"a rank has ended: {error!r}") from None

    def has_encoder_output(self, digest: bytes) -> bool:
        return digest not in self._doubtful

    def keep_encoder_outputs(self, digests: Set[bytes]) -> None:
        self._doubtful.clear()
        self.call(methodcaller("keep_encoder_outputs", digests))

    def call(self, function: Callable[[ModelRunner], None]) -> None:
        for channel in self._channels:
            with suppress(OSError), signals_deferred():  # a process that has ended is noticed elsewhere
                channel.send(function)

    def check(self) -> None:
        if self.failure is not None:
            raise RanksFailed(self.failure)

    def explained(self, error: BaseException) -> BaseException:
        if not isinstance(error, RuntimeError) or (self.failure is None and not isinstance(error, RanksFailed)):
            return error
        end = time.monotonic() + REASON_SECONDS
        while self.failure is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        self.failure = self._reported_error() or self.failure or str(error)
        return RanksFailed(self.failure)

    def _reported_error(self) -> str | None:
        """What a rank reported before it ended."""
        for channel in self._channels:
            with suppress(EOFError, OSError):
                while channel.pipe.poll():
                    if (report := channel.pipe.recv()).error is not None:
                        return report.error
        return None

    def fail(self, reason: str) -> None:
        """A process is lost; called by the thread that watches them."""
        self.failure = reason
        if self._ranks is not None:
            self._ranks.abort()
        self.on_failure()

    def exit(self) -> None:
        self._is_exiting.set()
        for channel in self._channels:
            with suppress(OSError):
                channel.send(None)
        end = time.monotonic() + EXIT_SECONDS
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        self._kill()
        atexit.unregister(self._kill)
        for channel in self._channels:
            channel.close()
        if self._ranks is not None:
            self._ranks.close()
        self._channels, self._ranks = [], None


def _start_process(*arguments: Any) -> multiprocessing.Process:
    """A process with the arguments of `run_rank`."""
    return start_process(run_rank, arguments, is_daemon=True)


def _watch(
    ref: "weakref.ref[MultiprocessGroup]", watched: list[Watched], timeout: float, is_exiting: threading.Event
) -> None:
    reason = first_lost(watched, timeout)
    worker_group = ref()
    if worker_group is not None and not is_exiting.is_set():
        worker_group.fail(reason)


def _messages(inputs: StepInputs, size: int) -> list[PackedMessage]:
    if not inputs.new_mm_items:
        return [PackedMessage(inputs)] * (size - 1)
    return [PackedMessage(_for_rank(inputs, rank)) for rank in range(1, size)]


def _for_rank(inputs: StepInputs, rank: int) -> StepInputs:
    """With the patches of those items only that this rank encodes."""
    pairs = zip(inputs.new_mm_items, inputs.encoders, strict=True)
    items = tuple(item if own == rank else replace(item, patches=item.patches[:0]) for item, own in pairs)
    return replace(inputs, new_mm_items=items)


def _connect(store: dist.Store, device: torch.device, size: int, connected: list[ConnectedRanks | Exception]) -> None:
    try:
        connected.append(ConnectedRanks.connect(store, 0, size, device))
    except Exception as error:
        connected.append(error)


def _kill_all(
    processes: list[multiprocessing.Process], is_exiting: threading.Event, watcher: threading.Thread, share: int | None
) -> None:
    """End the processes and the thread that watches them, and give their threads back."""
    is_exiting.set()
    for process in processes:
        process.kill()
    for process in processes:
        process.join(EXIT_SECONDS)
    # Were it still aborting the ranks in C++ when the interpreter ends, the program would crash.
    if watcher.is_alive() and watcher is not threading.current_thread():
        watcher.join(EXIT_SECONDS)
    if share is not None:
        THREAD_SHARES.give_back(share)
