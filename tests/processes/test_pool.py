"""Worker processes run tasks within a time limit and a memory limit, and are replaced when they end."""

import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import psutil
import pytest

from mmvllm.errors import ImageError
from mmvllm.processes import pool as pool_module
from mmvllm.processes.pool import TaskCancelled, WorkerDied, WorkerPool, WorkersUnusable, WorkerTimeout
from mmvllm.processes.start import how_it_ended
from mmvllm.processes.watchdog import new_pulse
from mmvllm.processes.worker import NICENESS, serve
from tests.helpers.engine.async_engines import wait_until
from tests.helpers.media import tasks
from tests.helpers.processes import wait_until_gone

pytestmark = pytest.mark.spawns

MiB = 1024 * 1024


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def test_results_and_arrays_come_back(pool):
    assert pool.run(tasks.echo, {"a": [1, 2]}) == {"a": [1, 2]}
    array = pool.run(tasks.make_array, 3 * MiB)
    assert array.nbytes == 3 * MiB and array[257] == 1 and array.flags.writeable
    assert pool.run(tasks.pid) != os.getpid()


def test_the_initializer_runs_in_each_process():
    pool = WorkerPool(1, tasks.remember, (5,))
    try:
        assert pool.run(tasks.recall) == 5
    finally:
        pool.close()


def test_an_error_keeps_its_type_and_facts_and_brings_no_frames_of_the_process(pool):
    with pytest.raises(ImageError, match="is damaged") as caught:
        pool.run(tasks.fail, ImageError("a.png", "is damaged"))
    assert caught.value.source == "a.png" and caught.value.__cause__ is caught.value.__context__ is None
    with pytest.raises(RuntimeError, match="function cannot be pickled"):
        pool.run(tasks.make_unpicklable)


@pytest.mark.essential
def test_a_task_over_its_time_is_ended_and_the_next_one_runs(pool):
    before = pool.run(tasks.pid)
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"longer than 0\.2 s"):
        pool.run(tasks.sleep, 60, timeout=0.2)
    assert time.monotonic() - start < 30
    assert not psutil.pid_exists(before)
    assert pool.run(tasks.echo, 1, timeout=60) == 1


def test_the_start_of_a_process_does_not_count_as_time_of_the_task():
    pool = WorkerPool(1, tasks.sleep, (1.0,))
    try:
        pool.run(tasks.echo, 1, timeout=0.8)
    finally:
        pool.close()


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_cancelled_task_is_ended_soon(pool, timeout, tmp_path):
    is_cancelled, marker = threading.Event(), tmp_path / "begun"
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(pool.run, tasks.sleep, 60, marker, timeout=timeout, is_cancelled=is_cancelled.is_set)
        while not marker.exists():
            time.sleep(0.01)
        is_cancelled.set()
        with pytest.raises(TaskCancelled):
            future.result(30)


@pytest.mark.essential
def test_a_process_that_dies_is_named_and_replaced(pool):
    with pytest.raises(WorkerDied, match="SIGSEGV"):
        pool.run(tasks.crash)
    assert pool.run(tasks.echo, 1) == 1


def test_an_idle_process_that_died_is_replaced_without_an_error(pool):
    victim = pool.run(tasks.pid)
    os.kill(victim, signal.SIGKILL)
    with suppress(ChildProcessError):  # the pool's watch has noticed it already
        os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
    assert pool.run(tasks.pid) != victim


def test_a_stopped_process_that_is_given_much_is_ended_in_time(pool):
    """It reads nothing, so that sending waits."""
    os.kill(victim := pool.run(tasks.pid), signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=r"longer than 0\.5 s"):
        pool.run(tasks.echo, b"x" * 10_000_000, timeout=0.5)
    assert not psutil.pid_exists(victim)
    assert pool.run(tasks.echo, 1, timeout=60) == 1


@pytest.fixture
def watchful() -> Iterator[WorkerPool]:
    pool = WorkerPool(1, silence=2.0)
    yield pool
    pool.close()


def test_an_idle_process_without_a_sign_of_life_is_replaced(watchful):
    os.kill(victim := watchful.run(tasks.pid), signal.SIGSTOP)
    wait_until_gone([victim])
    assert watchful.run(tasks.pid) != victim


def test_a_task_whose_process_gives_no_sign_of_life_ends(watchful, tmp_path):
    victim, marker = watchful.run(tasks.pid), tmp_path / "begun"
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(watchful.run, tasks.sleep, 60, marker)
        wait_until(marker.exists, "begun")
        os.kill(victim, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="it did not answer for 2 s and was killed"):
            future.result(30)


def test_a_task_that_its_process_does_not_read_ends(watchful):
    os.kill(watchful.run(tasks.pid), signal.SIGSTOP)
    with pytest.raises(WorkerDied, match="it did not answer for 2 s and was killed"):
        watchful.run(tasks.echo, bytes(10_000_000))


def test_a_process_that_is_killed_takes_stopped_ones_along(pool, tmp_path):
    child = psutil.Process(pool.run(tasks.start_process_that_sleeps))
    child.suspend()
    with pytest.raises(WorkerTimeout):
        pool.run(tasks.sleep, 60, timeout=0.2)
    wait_until_gone([child.pid])


def test_how_a_process_ended_is_known_while_another_thread_asks_for_it_too():
    codes = iter([None, None, -signal.SIGKILL])  # the system tells one of them

    class Ended:
        exitcode = property(lambda self: next(codes))

        def join(self, timeout: float) -> None:
            pass

    assert how_it_ended(Ended()) == "was ended by SIGKILL"


def test_processes_that_end_at_once_are_an_error_of_the_pool():
    pool = WorkerPool(1, tasks.end_at_once)
    try:
        with pytest.raises(WorkersUnusable, match="end as soon as they begin: it ended with exit code 3"):
            pool.run(tasks.echo, 1)
    finally:
        pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
def test_memory_over_the_limit_is_an_error_in_the_process():
    pool = WorkerPool(1)
    try:
        for limit, reserved in ((64, 0), (16, 64)):
            limits = limit * MiB, reserved * MiB
            assert pool.run(tasks.allocate_with_reservation, 48 * MiB, *limits) == 48 * MiB
            with pytest.raises(MemoryError):
                pool.run(tasks.allocate_with_reservation, 100 * MiB, *limits)
        assert pool.run(tasks.allocate, 200 * MiB) == 200 * MiB  # without a limit again
    finally:
        pool.close()


def test_what_a_process_logs_is_logged_by_the_parent(caplog):
    pool = WorkerPool(1, tasks.warn, ("ready",))
    try:
        assert [pool.run(tasks.echo, i) for i in range(3)] == [0, 1, 2]
        pool.run(tasks.warn, "done")
        logging.getLogger("mmvllm.tasks").setLevel(logging.ERROR)
        pool.run(tasks.warn, "quiet")
    finally:
        pool.close()
        logging.getLogger("mmvllm.tasks").setLevel(logging.NOTSET)
    assert caplog.record_tuples == [("mmvllm.tasks", logging.WARNING, text) for text in ("ready!", "done!")]


def test_reserved_bytes_are_held_until_the_task_ends_and_waiting_for_them_takes_no_time():
    events, may_begin = [], threading.Event()

    @contextmanager
    def reserve(num_bytes: int, _) -> Iterator[None]:
        may_begin.wait(10)
        events.append(num_bytes)
        try:
            yield
        finally:
            events.append(-num_bytes)

    pool = WorkerPool(1, tasks.remember, (0,), reserve=reserve)
    try:
        threading.Timer(1.2, may_begin.set).start()
        pool.run(tasks.reserve_and_sleep, 7, 0.0, timeout=1.0)
        assert events == [7, -7]
        with pytest.raises(WorkerTimeout):
            pool.run(tasks.reserve_and_sleep, 8, 60.0, timeout=0.2)
        assert events == [7, -7, 8, -8]
    finally:
        pool.close()


def test_more_threads_than_processes_take_turns(pool):
    with ThreadPoolExecutor(6) as threads:
        assert [*threads.map(lambda i: pool.run(tasks.echo, i), range(40))] == [*range(40)]
    assert len({pool.run(tasks.pid) for _ in range(4)}) <= 2


def test_closing_ends_processes_and_tasks_in_flight_at_once(tmp_path):
    pool, marker = WorkerPool(1), tmp_path / "begun"
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(pool.run, tasks.sleep, 60, marker)
        while not marker.exists():
            time.sleep(0.01)
        pool.close()
        with pytest.raises(WorkersUnusable, match="closed"):
            future.result(10)
    with pytest.raises(WorkersUnusable, match="closed"):
        pool.run(tasks.echo, 1)


def test_processes_ignore_signals_to_the_group_of_their_parent(pool):
    assert pool.run(tasks.ignored_signals) == [True, True]


SCRIPT = """
from mmvllm.processes.watchdog import new_pulse
from mmvllm.processes.pool import WorkerPool
from tests.helpers.media import tasks
print("begins")
pool = WorkerPool(2)
print(pool.run(tasks.echo, "worked"))
{end}
"""


@pytest.mark.parametrize("end", ["", "pool.close()", "import os; os._exit(0)"])
def test_a_plain_script_is_not_run_again_by_its_processes_and_ends_cleanly(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=f"print(pool.run(tasks.pid), flush=True)\n{end}"))
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=60)
    *lines, pid = ran.stdout.split()
    assert (ran.returncode, lines, ran.stderr) == (0, ["begins", "worked"], "")
    wait_until_gone([int(pid)])


MAIN_CLASS = """
from mmvllm.processes.watchdog import new_pulse
from mmvllm.processes.pool import WorkerPool
from tests.helpers.media import tasks
class Mine:
    value = 5
if __name__ == "__main__":
    pool = WorkerPool(1, tasks.remember, (Mine(),))
    print(pool.run(tasks.recall).value)
"""


def test_objects_of_the_main_modules_classes_can_be_sent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(MAIN_CLASS)
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=60)
    assert (ran.stdout, ran.stderr) == ("5\n", "")


def test_a_cancelled_task_does_not_wait_for_a_process_or_for_reserved_bytes():
    is_cancelled, may_begin = threading.Event(), threading.Event()

    @contextmanager
    def reserve(_: int, next_wait) -> Iterator[None]:
        while not may_begin.wait(next_wait()):
            pass
        yield

    pool = WorkerPool(1, reserve=reserve)
    try:
        with ThreadPoolExecutor(2) as threads:
            for_bytes = threads.submit(pool.run, tasks.reserve_and_sleep, 1, 0.0, is_cancelled=is_cancelled.is_set)
            for_process = threads.submit(pool.run, tasks.echo, 1, is_cancelled=is_cancelled.is_set)
            time.sleep(0.5)
            is_cancelled.set()
            for waiting in (for_bytes, for_process):
                with pytest.raises(TaskCancelled):
                    waiting.result(20)
        may_begin.set()
        with pytest.raises(TaskCancelled):
            pool.run(tasks.echo, 1, is_cancelled=lambda: True)
        assert pool.run(tasks.echo, 1) == 1
    finally:
        pool.close()


def test_a_thread_that_cannot_start_a_process_wakes_the_next_one(monkeypatch):
    pool = WorkerPool(1)
    try:
        assert pool.run(tasks.echo, 1) == 1
        with ThreadPoolExecutor(3) as threads:
            first = threads.submit(pool.run, tasks.sleep, 60, timeout=0.5)
            time.sleep(0.2)
            real, fails = pool_module._Worker, iter([True])
            monkeypatch.setattr(
                pool_module, "_Worker", lambda *setup: _refuse() if next(fails, False) else real(*setup)
            )
            waiting = [threads.submit(pool.run, tasks.echo, i) for i in range(2)]
            with pytest.raises(WorkerTimeout):
                first.result(20)
            outcomes = [future.exception(20) for future in waiting]
            assert sorted(map(repr, outcomes)) == ["BlockingIOError('no process')", "None"]
    finally:
        pool.close()


def _refuse() -> None:
    raise BlockingIOError("no process")


def test_a_process_with_an_engine_has_its_environment_and_priority_and_starts_processes():
    pool = WorkerPool(1, engine_env={"OMP_NUM_THREADS": "3"})
    try:
        assert pool.run(tasks.niceness_and_threads) == (os.nice(0), "3")
        assert pool.run(tasks.run_in_a_process, tasks.niceness_and_threads) == (os.nice(0) + NICENESS, "1")
    finally:
        pool.close()


def test_a_process_whose_parent_has_gone_ends_without_a_traceback():
    """The connection is reset, not closed, if the parent has not read all."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, None, pickle.dumps((dict, ())), None, new_pulse()))
    process.start()
    theirs.close()
    assert pipe.poll(30)
    pipe.close()
    process.join(30)
    assert process.exitcode == 0
