"""Python's garbage collection in long-running processes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from mmvllm.utils.memory_limit import return_freed_memory


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Exclude objects that exist on entry, about a million in torch, from garbage collection until exit.

    Searching them took a quarter of the interpreter's time in a server under load.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def collect_everything(device: torch.device) -> None:
    """Free unreferenced objects, frozen ones included, and return the memory to the system and the device."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    if device.type == "cuda":
        with suppress(RuntimeError):  # the device may be lost
            torch.cuda.empty_cache()
    return_freed_memory()
