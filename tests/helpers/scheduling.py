"""The scheduling policy of the thread that runs the tests."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def as_scheduled() -> Iterator[Callable[[], bool]]:
    """Restore the scheduling policy of this thread at the end; yields a function that tells whether it is unchanged.

    SVT-AV1 gives the thread that calls it real-time priority if it may, as root. Threads and processes that are started
    afterwards inherit it, and keep others waiting for minutes.
    """
    if not hasattr(os, "sched_setscheduler"):  # macOS
        yield lambda: True
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield lambda: os.sched_getscheduler(0) == policy
    finally:
        os.sched_setscheduler(0, policy, parameters)
