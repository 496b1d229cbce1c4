"""Processes of engines that end are started again, after pauses that grow."""

import itertools
import threading
from pathlib import Path

import pytest

from mmvllm import EngineConfig
from mmvllm.engine.stats import EngineStats
from mmvllm.parallel import supervisor
from mmvllm.parallel.engine_core import EngineFacts, Failure, News, Refusal
from mmvllm.parallel.supervisor import LONGEST_PAUSE, EngineKeeper, pause_after
from tests.helpers.engine.async_engines import wait_until

FACTS, NEWS = EngineFacts(100, 4, 16, 16), News([], EngineStats(), None)


class FakeEngine:
    """A process that sends what it is told to, and ends."""

    lives = iter(())

    def __init__(self, *_):
        self.own = next(self.lives, None)
        self.is_killed = threading.Event()

    def messages(self):
        yield from [FACTS] if self.own is None else self.own
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

    def on_ready(self, index, facts) -> None:
        self.calls.append("ready")

    def on_news(self, index, news) -> None:
        self.calls.append("news")

    def on_lost(self, index, reason, refusal) -> None:
        self.calls.append((reason, refusal))


@pytest.fixture
def keep(monkeypatch):
    """Start a keeper whose processes live in turn as given, and then for ever; stopped after the test."""
    monkeypatch.setattr(supervisor, "RemoteEngine", FakeEngine)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.001)
    made = []

    def start(*lives) -> tuple[EngineKeeper, Listener]:
        monkeypatch.setattr(FakeEngine, "lives", iter(lives))
        listener = Listener()
        made.append(EngineKeeper(0, (Path(), EngineConfig(), None), 1, listener))
        made[-1].start()
        return made[-1], listener

    yield start
    for keeper in made:
        keeper.stop()
        keeper.join(0)
        assert not keeper._thread.is_alive()


def test_a_process_that_ends_is_followed_by_another(keep):
    _, listener = keep([FACTS, NEWS], [FACTS])
    wait_until(lambda: listener.calls.count("ready") == 3, "started three times")
    killed = ("its process was ended by SIGKILL", None)
    assert listener.calls == ["ready", "news", killed, "ready", killed, "ready"]


def test_the_reason_is_what_the_process_said(keep):
    error = ValueError("no such model")
    _, listener = keep([Refusal(error)], [FACTS, Failure("RuntimeError: CUDA error")])
    wait_until(lambda: listener.calls.count("ready") == 2, "started")
    assert listener.calls[0] == ("ValueError: no such model", error)
    assert listener.calls[2] == ("RuntimeError: CUDA error", None)


def test_failed_starts_are_counted_one_after_the_other(keep):
    keeper, listener = keep([], [], [FACTS], [], [])
    wait_until(lambda: listener.calls.count("ready") == 2, "started")
    assert keeper.num_failed_starts == 2


def test_what_cannot_be_started_is_tried_again(keep, monkeypatch):
    numbers = itertools.count()

    def fail_twice(*args):
        if next(numbers) < 2:
            raise OSError("too many open files")
        return FakeEngine(*args)

    monkeypatch.setattr(supervisor, "RemoteEngine", fail_twice)
    _, listener = keep()
    wait_until(lambda: "ready" in listener.calls, "started")
    assert listener.calls == [("OSError: too many open files", None)] * 2 + ["ready"]


def test_pauses_grow_up_to_a_minute():
    pauses = [pause_after(number) for number in (0, 1, 2, 3, 10, 10**6)]
    assert pauses == sorted(pauses) and pauses[0] == 0.5 and pauses[-1] == LONGEST_PAUSE == 60
