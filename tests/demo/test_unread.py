"""The memory of results that wait for a browser is limited, and goes to those that read."""

from queue import Queue

import pytest

from mmvllm.demo import unread
from mmvllm.demo.unread import SENT_FACTOR, UnreadResults

LARGE = "a" * 1000


class Queues(dict):
    """Gradio's queues; a session that is dropped has none."""

    def __init__(self):
        self.dropped: list[str] = []
        self.results = UnreadResults(self, self.drop)

    def drop(self, session_id: str) -> None:
        self.dropped.append(session_id)
        self.pop(session_id, None)

    def put(self, session_id: str, content: str) -> None:
        self.setdefault(session_id, Queue()).put(content)
        self.results.count(session_id, content)


@pytest.fixture
def now(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(unread.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def queues(now, monkeypatch) -> Queues:
    monkeypatch.setattr(unread, "MAX_UNREAD_BYTES", 5000)
    return Queues()


def test_what_was_read_is_not_counted(queues, now):
    for number in range(50):
        now[0] += 1
        queues.put(f"s{number % 7}", LARGE)
        queues[f"s{number % 7}"].get()
    assert queues.dropped == []


def test_the_session_that_keeps_much_for_long_is_dropped(queues, now):
    """Not a visitor whose result is larger than those that an attacker leaves with many sessions."""
    for name in ("a", "b"):
        queues.put(name, LARGE)
        queues.put(name, "small")
    now[0] = 10.0
    queues.put("visitor", LARGE * 3)
    assert queues.dropped == ["a"]
    queues.put("visitor", LARGE)
    assert queues.dropped == ["a", "b"] and "visitor" in queues


def test_messages_that_are_sent_slowly_count_until_they_are_sent(queues, now):
    with queues.results.being_sent("slow", 3 * len(LARGE) // SENT_FACTOR):
        now[0] = 5.0
        queues.put("other", LARGE)
        assert queues.dropped == []
        queues.put("other", LARGE)
        assert queues.dropped == ["slow"]
    queues.put("other", LARGE)
    assert queues.dropped == ["slow"]


def test_messages_to_several_connections_of_a_session_count_together(queues, now):
    with queues.results.being_sent("slow", 300), queues.results.being_sent("slow", 300):
        now[0] = 1.0
        with queues.results.being_sent("slow", 400):
            assert queues.dropped == ["slow"]
