"""Signal handlers, which may raise exceptions anywhere in the main thread: when they run, and when not."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WAIT_SECONDS = 1.0  # at a time: Windows does not interrupt a wait, and Ctrl-C is handled after it


def wait_until(is_true: Callable[[], Any], changed: threading.Condition) -> None:
    """As `changed.wait_for(is_true)`, but handlers run while it waits."""
    while not changed.wait_for(is_true, WAIT_SECONDS):
        pass


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM after the block, for what must not be left half done."""
    if threading.current_thread() is not threading.main_thread():  # no handler runs in other threads
        yield
        return
    received: list[int] = []
    try:
        with _deferred(signal.SIGINT, received), _deferred(signal.SIGTERM, received):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


@contextmanager
def _deferred(number: int, received: list[int]) -> Iterator[None]:
    """One signal: a handler of the other one that raises while this one's is set leaves none behind."""
    handler = signal.getsignal(number)
    if handler is None:  # not of Python: it raises no exception, and could not be set again
        yield
        return
    try:
        signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        signal.signal(number, handler)
