"""Processes of engines that end are started again, after pauses that grow."""

import itertools
import threading
from pathlib import Path

import pytest

from mmvllm import EngineConfig
from mmvllm.engine.stats import EngineStats
from mmvllm.parallel import supervisor
from mmvllm.parallel.engine_core import EngineDead, EngineOutputs, EngineReady, StartupError
from mmvllm.parallel.supervisor import MAX_BACKOFF, EngineSupervisor, backoff_seconds
from tests.helpers.engine.async_engines import wait_until

READY, OUTPUTS = EngineReady(100, 4, 16, 16), EngineOutputs([], EngineStats(), None)


class FakeEngine:
    """A process that sends what it is told to, and ends."""

    lives = iter(())

    def __init__(self, *_):
        self.own = next(self.lives, None)
        self.is_killed = threading.Event()

    def messages(self):
        yield from [READY] if self.own is None else self.own
        if self.own is None:  # runs until it is killed
            self.is_killed.wait()

    def stop(self) -> None:
        self.is_killed.set()

    def kill(self) -> str:
        self.is_killed.set()
        return "its process was ended by SIGKILL"

    def close(self) -> None:
        pass

    class process:
        join = staticmethod(lambda _: None)


class Listener:
    def __init__(self):
        self.calls = []

    def on_ready(self, index, ready) -> None:
        self.calls.append("ready")

    def on_outputs(self, index, outputs) -> None:
        self.calls.append("outputs")

    def on_lost(self, index, reason, startup_error) -> None:
        self.calls.append((reason, startup_error))


@pytest.fixture
def keep(monkeypatch):
    """Start a supervisor whose processes live in turn as given, and then for ever; stopped after the test."""
    monkeypatch.setattr(supervisor, "EngineCoreClient", FakeEngine)
    monkeypatch.setattr(supervisor, "INITIAL_BACKOFF", 0.001)
    made = []

    def start(*lives) -> tuple[EngineSupervisor, Listener]:
        monkeypatch.setattr(FakeEngine, "lives", iter(lives))
        listener = Listener()
        made.append(EngineSupervisor(0, (Path(), EngineConfig(), None), 1, listener))
        made[-1].start()
        return made[-1], listener

    yield start
    for engine in made:
        engine.stop()
        engine.join(0)
        assert not engine._thread.is_alive()


def test_a_process_that_ends_is_followed_by_another(keep):
    _, listener = keep([READY, OUTPUTS], [READY])
    wait_until(lambda: listener.calls.count("ready") == 3, "started three times")
    killed = ("its process was ended by SIGKILL", None)
    assert listener.calls == ["ready", "outputs", killed, "ready", killed, "ready"]


def test_the_reason_is_what_the_process_said(keep):
    error = ValueError("no such model")
    _, listener = keep([StartupError(error)], [READY, EngineDead("RuntimeError: CUDA error")])
    wait_until(lambda: listener.calls.count("ready") == 2, "started")
    assert listener.calls[0] == ("ValueError: no such model", error)
    assert listener.calls[2] == ("RuntimeError: CUDA error", None)


def test_failed_starts_are_counted_one_after_the_other(keep):
    supervisor, listener = keep([], [], [READY], [], [])
    wait_until(lambda: listener.calls.count("ready") == 2, "started")
    assert supervisor.num_failed_starts == 2


def test_what_cannot_be_started_is_tried_again(keep, monkeypatch):
    numbers = itertools.count()

    def fail_twice(*args):
        if next(numbers) < 2:
            raise OSError("too many open files")
        return FakeEngine(*args)

    monkeypatch.setattr(supervisor, "EngineCoreClient", fail_twice)
    _, listener = keep()
    wait_until(lambda: "ready" in listener.calls, "started")
    assert listener.calls == [("OSError: too many open files", None)] * 2 + ["ready"]


def test_pauses_grow_up_to_a_minute():
    pauses = [backoff_seconds(number) for number in (0, 1, 2, 3, 10, 10**6)]
    assert pauses == sorted(pauses) and pauses[0] == 0.5 and pauses[-1] == MAX_BACKOFF == 60
