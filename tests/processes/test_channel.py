"""Messages between processes: buffers in shared memory or a pipe, and nothing left when a process is killed."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest

from mmvllm.processes import channel
from mmvllm.processes.channel import KEPT_BYTES, SHARED_BYTES, Channel, SharedBuffer
from mmvllm.processes.pool import WorkerDied, WorkerPool, WorkerTimeout
from tests.helpers.media import tasks

MiB = 1024 * 1024
linux = pytest.mark.skipif(sys.platform != "linux", reason="the shared memory is Linux's")


@pytest.fixture(params=["shared memory", "pipe"])
def ends(request) -> Iterator[tuple[Channel, Channel]]:
    shared = SharedBuffer.create() if request.param == "shared memory" else None
    if request.param == "shared memory" and shared is None:
        pytest.skip("the shared memory is Linux's")
    pipes = multiprocessing.Pipe()
    yield tuple(Channel(pipe, shared) for pipe in pipes)
    for pipe in pipes:
        pipe.close()


def passed(ends: tuple[Channel, Channel], message: object) -> object:
    """What arrives; sent by a thread, because a pipe holds little."""
    sender = threading.Thread(target=ends[0].send, args=(message,))
    sender.start()
    try:
        return ends[1].receive()
    finally:
        sender.join()


def arrays(*sizes: int) -> list[np.ndarray]:
    return [np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in sizes]


@linux
def test_memory_that_is_refused_leaves_no_descriptor(monkeypatch):
    """A limit on file sizes refuses it; the pipe is used then."""

    def refuse(*_):
        raise OSError("File too large")

    before = psutil.Process().num_fds()
    monkeypatch.setattr(os, "ftruncate", refuse)
    assert SharedBuffer.create() is None and psutil.Process().num_fds() == before


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (0, 3, 0), (63, 64, 65), (3 * MiB, 1, 2 * MiB + 1)])
def test_buffers_of_any_size_arrive(ends, sizes):
    sent = arrays(*sizes)
    got = passed(ends, {"arrays": sent})["arrays"]
    assert len(got) == len(sent) and all(np.array_equal(a, b) for a, b in zip(got, sent, strict=True))
    assert all(array.flags.writeable for array in got)


def test_dtypes_shapes_and_read_only_arrays_arrive(ends):
    sent = np.arange(60, dtype=np.float64).reshape(3, 4, 5)
    sent.flags.writeable = False
    got, again = passed(ends, (sent, sent.astype(np.int16)))
    assert np.array_equal(got, sent) and not got.flags.writeable
    assert again.dtype == np.int16 and again.shape == (3, 4, 5) and again.flags.writeable


def test_what_has_arrived_is_not_changed_by_later_messages(ends):
    first = passed(ends, arrays(MiB))
    passed(ends, [np.zeros(MiB, np.uint8)])
    assert np.array_equal(first[0], arrays(MiB)[0])


@linux
def test_messages_larger_than_the_shared_memory_go_through_the_pipe(monkeypatch):
    monkeypatch.setattr(channel, "SHARED_BYTES", MiB)
    shared = SharedBuffer.create()
    ends = [Channel(pipe, shared) for pipe in multiprocessing.Pipe()]
    for size in (MiB, MiB + 1, 100):
        assert np.array_equal(passed(ends, arrays(size))[0], arrays(size)[0])


@linux
def test_memory_of_large_messages_is_given_back():
    shared = SharedBuffer.create()
    for size, kept in ((KEPT_BYTES, KEPT_BYTES), (5 * KEPT_BYTES, 0), (MiB, MiB)):
        assert shared.write([memoryview(np.ones(size, np.uint8))])
        assert all(array.all() for array in shared.read([size]))
        assert 512 * os.fstat(shared._descriptor).st_blocks == kept
    assert not shared.write([memoryview(np.ones(SHARED_BYTES + 1, np.uint8))])


@pytest.mark.spawns
def test_a_system_without_such_memory_uses_the_pipe(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert SharedBuffer.create() is None
    pool = WorkerPool(1)
    try:
        assert pool.run(tasks.make_array, 3 * MiB)[257] == 1
    finally:
        pool.close()


def held_by_this_process() -> tuple[int, int]:
    """Open files, and mapped buffers of channels."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return psutil.Process().num_fds(), maps.count("memfd:mmvllm-worker")


@pytest.mark.slow
@linux
def test_processes_killed_at_any_moment_leave_no_memory_behind():
    # The first process opens files that stay: of multiprocessing's resource tracker and shared memory.
    with closing(WorkerPool(1)) as first:
        first.run(tasks.pid)
    del first
    before, outcomes = held_by_this_process(), []
    pool = WorkerPool(1)
    with ThreadPoolExecutor(1) as threads:
        for wait in (0.0, 0.01, 0.02, 0.04, 0.08):
            victim = pool.run(tasks.pid)
            arriving = threads.submit(pool.run, tasks.make_array, 100 * MiB)
            time.sleep(wait)
            os.kill(victim, signal.SIGKILL)
            outcomes.append(arriving.exception(60))
            # Where the result came first, the process may end while it has this task.
            with pytest.raises((WorkerTimeout, WorkerDied)):
                pool.run(tasks.sleep, 60, timeout=0.01)
            assert np.array_equal(pool.run(tasks.make_array, MiB), tasks.make_array(MiB))
            assert held_by_this_process()[1] == before[1] + 1
    assert all(isinstance(error, WorkerDied | None) for error in outcomes), outcomes
    pool.close()
    assert held_by_this_process()[1] == before[1]
    del pool, arriving, outcomes  # errors hold frames, and those hold what tells how a process ended
    assert held_by_this_process() == before


@pytest.mark.spawns
def test_a_process_can_choose_the_number_of_threads_before_numpy_is_loaded():
    script = "import sys; import mmvllm.processes.worker; print('numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("False\n", "")
