"""Tasks for the engine processes of a captioning job, which import this module."""

import os
import signal

from mmvllm.captioning.jobs.process_source import exchange
from mmvllm.captioning.sources.items import Item


def exchange_unless_poisonous(items: list[tuple[int, Item]], is_stopped: bool, seconds: float):
    """`exchange`, but an image with "poison" in its name ends the process."""
    if any("poison" in item.path for _, item in items):
        os.kill(os.getpid(), signal.SIGKILL)
    return exchange(items, is_stopped, seconds)
