"""Signal handlers, which may raise exceptions anywhere in the main thread."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
    try:
        signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
