"""Measure the memory of values and, on Linux, limit this process's memory and return freed memory to the system."""

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

_limit: int | None = None  # bytes of writable memory, not counting the bytes of `allow`


def memory_of(value: Any) -> int:
    """Return the bytes in memory of a string, number, list or dict, including its items or values."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sys.getsizeof(value) + sum(map(memory_of, inner))


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Limit the process's memory to `num_bytes` more than at the first call, plus the bytes of `allow`.

    Allocating more raises MemoryError. The limit applies to all threads and cannot be nested.
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
    """Let the process allocate `num_bytes` beyond its limit, replacing the bytes of the previous call."""
    if _limit is not None:
        _limit_memory(_limit + num_bytes)


@cache
def _first_bytes() -> int | None:
    """Return the writable memory of this process at the first call; None if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except OSError:
        return None


def _limit_memory(num_bytes: int | None) -> None:
    """Limit the writable memory of this process; None allows as much as the system does."""
    with suppress(OSError, ValueError):  # a sandbox forbids limits
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = most if num_bytes is None or 0 <= most < num_bytes else num_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def return_freed_memory() -> None:
    """Return freed memory to the system; the C library may keep gigabytes of it."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc
        trim(0)
