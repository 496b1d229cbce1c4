"""Work that takes too long is left behind; waits that are not its own do not count."""

import cProfile
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from mmvllm.utils import time_limit
from mmvllm.utils.time_limit import TimeIsOver, TimeLimit, Watchdog


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_work_has_its_result_or_its_error():
    assert TimeLimit(60).run(lambda: 3) == 3
    with pytest.raises(KeyError, match="no"):
        TimeLimit(60).run(lambda: {}["no"])


def test_work_that_never_ends_is_left_behind():
    release, begun, thread = threading.Event(), threading.Event(), []

    def work():
        thread.append(threading.current_thread())
        begun.set()
        release.wait()

    with pytest.raises(TimeIsOver):
        TimeLimit(0.01).run(work)
    begun.wait()
    release.set()
    assert thread[0].daemon  # the program does not wait for it
    thread[0].join()


def test_what_work_holds_is_released_when_it_is_left_behind():
    release, limit, released = threading.Event(), TimeLimit(0), []
    with limit.released_when_over(lambda: released.append("before")):
        with pytest.raises(TimeIsOver):
            limit.run(release.wait)
        assert released == ["before"]
    with limit.released_when_over(lambda: released.append("after")):
        assert released == ["before", "after"]
    release.set()
    assert released == ["before", "after"]


def test_what_work_holds_is_released_at_its_end():
    released = []
    with TimeLimit(60).released_when_over(lambda: released.append(1)):
        assert not released
    assert released == [1]


def test_an_error_that_comes_of_the_limit_is_the_limit():
    limit = TimeLimit(0)

    def work():
        try:
            limit.check()
        except TimeIsOver:
            raise ValueError("cannot be decoded") from None

    with pytest.raises(TimeIsOver):
        limit.run(work)


def test_a_stopped_clock_does_not_count(clock):
    limit = TimeLimit(10)
    clock[0] = 4
    with limit.stopped_clock():
        clock[0] = 100
        limit.check()
    clock[0] = 105
    limit.check()
    clock[0] = 107
    with pytest.raises(TimeIsOver):
        limit.check()


@pytest.fixture
def watchdog(monkeypatch):
    """One that interrupts every millisecond.

    Garbage of other tests is collected before and after it: what interrupts a finalizer is reported as "unraisable".
    """
    monkeypatch.setattr(time_limit, "WATCH_SECONDS", 0.001)
    gc.collect()
    gc.disable()
    yield Watchdog()
    gc.enable()


def loop_for_ever() -> None:
    while True:
        pass


def test_code_that_runs_for_too_long_is_interrupted(watchdog):
    with pytest.raises(TimeIsOver):
        watchdog.run(loop_for_ever, 0)
    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(watchdog.run, work, seconds) for work, seconds in [(loop_for_ever, 0), (lambda: 3, 60)]]
        assert isinstance(tasks[0].exception(), TimeIsOver) and tasks[1].result() == 3
    with pytest.raises(KeyError, match="no"):
        watchdog.run(lambda: {}["no"], 60)


def test_code_that_catches_the_interruption_is_interrupted_again(watchdog):
    caught = []

    def catch() -> None:
        for _ in range(3):
            try:
                loop_for_ever()
            except BaseException as error:
                caught.append(error)
        raise ValueError("made of it")

    with pytest.raises(TimeIsOver):
        watchdog.run(catch, 0)
    assert len(caught) == 3 and not any(isinstance(error, Exception) for error in caught)


def test_code_that_ends_as_it_is_interrupted_leaves_nothing_behind(watchdog):
    for _ in range(50):
        with suppress(TimeIsOver):
            watchdog.run(lambda: time.sleep(0.001), 0)
    assert cProfile.Profile().runcall(lambda: 3) == 3  # hangs if the interpreter still has something to raise
