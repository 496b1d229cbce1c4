"""The memory of values, and that of this process: on Linux a limit of it, and the return of what is freed."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

_limit: int | None = None  # bytes of writable memory, without what was allowed beyond it


def memory_of(value: Any) -> int:
    """Bytes in memory of strings, numbers, lists and dicts, with what they hold."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sys.getsizeof(value) + sum(map(memory_of, inner))


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Within, the process may allocate this much beyond what it had when this was first called, and what is allowed.

    More is a MemoryError. The limit is that of all threads, and is not nested.
    """
    global _limit
    _limit = None if _first_bytes() is None else _first_bytes() + num_bytes
    allow(0)
    try:
        yield
    finally:
        _limit = None
        _limit_memory(None)


def allow(num_bytes: int) -> None:
    """Let the process allocate this much beyond its limit, in place of what was allowed before."""
    if _limit is not None:
        _limit_memory(_limit + num_bytes)


@cache
def _first_bytes() -> int | None:
    """Writable memory of this process, at the first call; None where the system does not tell it."""
    try:
        import resource  # not on Windows

        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except (ImportError, OSError):
        return None


def _limit_memory(num_bytes: int | None) -> None:
    """Set how much writable memory this process may have; None is as much as the system lets it have."""
    with suppress(ImportError, OSError, ValueError):  # not Linux, or a sandbox that does not let it be limited
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = most if num_bytes is None or 0 <= most < num_bytes else num_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def return_freed_memory() -> None:
    """Give freed memory to the system, which the C library does not do by itself, even if it is gigabytes."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc
        trim(0)
