"""Python's garbage collection in processes that serve for long."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_old_objects() -> Iterator[None]:
    """Inside, what exists at the beginning is not searched for garbage; a million objects of torch are, otherwise.

    Searching them took a quarter of the interpreter's time of a server under load.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
