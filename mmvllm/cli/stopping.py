"""Signals while `mmvllm caption` runs."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mmvllm.processes.signals import ended_by_second_signal

if TYPE_CHECKING:
    from mmvllm.captioning.run import CaptionRun


@contextmanager
def stopping(job: "CaptionRun") -> Iterator[list[int]]:
    """Stop the job at the first SIGINT or SIGTERM, and end it at the second; yields the list of received signals."""
    received: list[int] = []

    def stop(number: int, _) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        job.stop()
        # Not print, because the signal may interrupt another print.
        os.write(2, b"\nstopping: images in flight are finished first; interrupt again to stop now\n")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ended_by_second_signal():
            yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
