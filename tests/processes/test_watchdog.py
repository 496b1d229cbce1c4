"""A process that ends, or gives no sign of life, is noticed; a pause of the whole program is not its silence."""

import threading
import time
from ctypes import c_uint64

import pytest

from mmvllm.config import EngineConfig
from mmvllm.processes import watchdog, worker
from mmvllm.processes.watchdog import START_SECONDS, Watched, first_lost
from mmvllm.processes.worker import BEAT_SECONDS, beating


class Process:
    """Ends when it is killed."""

    sentinel, exitcode = 3, None

    def __init__(self):
        self.was_killed = False

    def is_alive(self) -> bool:
        return False

    def kill(self) -> None:
        self.was_killed = True


@pytest.fixture
def looks(monkeypatch):
    """What happens at each look of `first_lost`: functions, after which the time of a beat has passed."""
    looks, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(sentinels, seconds):
        now[0] += seconds
        return looks.pop(0)(now) or []

    monkeypatch.setattr(watchdog.connection, "wait", wait)
    return looks


def lost(looks, *, at: int, pulse: c_uint64, timeout: float) -> None:
    """The process is killed at this look, the last of them."""
    process = Process()
    reason = first_lost([Watched("its process", process, pulse)], timeout)
    assert reason == f"its process did not answer for {timeout:g} s and was killed" and process.was_killed
    assert len(looks) == 100 - at


def test_a_process_that_never_begins_to_count_is_killed(looks):
    looks += [lambda _: None] * round(START_SECONDS / BEAT_SECONDS) + [lambda _: None] * 100
    lost(looks, at=1, pulse=c_uint64(0), timeout=6 * BEAT_SECONDS)


def test_a_process_whose_pulse_stops_is_killed(looks):
    pulse = c_uint64(0)

    def beat(_):
        pulse.value += 1

    looks += [lambda _: None] * 50 + [beat] * 10 + [lambda _: None] * 40  # it takes its time to start
    lost(looks, at=50 + 10 + 7, pulse=pulse, timeout=6 * BEAT_SECONDS)


def test_a_pause_of_the_program_is_not_its_silence(looks):
    pulse = c_uint64(1)

    def pause(now):
        now[0] += 1000

    looks += [lambda _: None, pause, lambda _: None] + [lambda _: None] * 97
    lost(looks, at=1 + 2 + 6, pulse=pulse, timeout=8 * BEAT_SECONDS)


def test_a_process_beats_until_its_work_is_over(monkeypatch):
    monkeypatch.setattr(worker, "BEAT_SECONDS", 0.001)
    pulse = c_uint64(0)
    with beating(pulse):
        while pulse.value < 3:
            time.sleep(0.001)
        (thread,) = [each for each in threading.enumerate() if each.name == "mmvllm-pulse"]
    thread.join()


@pytest.mark.parametrize("value", [0, -1, 1.9, True, float("nan"), "60"])
def test_the_step_timeout_is_a_number_of_seconds(value):
    with pytest.raises(ValueError, match=r"step_timeout must be a number of seconds, at least 2, got .*"):
        EngineConfig(step_timeout=value)
    assert EngineConfig().step_timeout == 60
