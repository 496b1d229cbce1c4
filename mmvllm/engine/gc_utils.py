"""Python's garbage collection in processes that serve for long."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from mmvllm.utils.memory_limit import return_freed_memory


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Inside, what exists at the beginning is not searched for garbage; a million objects of torch are, otherwise.

    Searching them took a quarter of the interpreter's time of a server under load.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def collect_everything(device: torch.device) -> None:
    """Free what nothing refers to, old objects included, and give the memory back to the system and the device."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    if device.type == "cuda":
        with suppress(RuntimeError):  # of a device that is lost
            torch.cuda.empty_cache()
    return_freed_memory()
