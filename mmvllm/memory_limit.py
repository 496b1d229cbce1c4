"""A limit of the memory that this process may allocate. Linux counts and limits it; elsewhere there is none."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_limit: int | None = None  # bytes of writable memory, without what was allowed beyond it


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Within, the process may allocate this much beyond what it has, and what is allowed with `allow`.

    More is a MemoryError. The limit is that of all threads.
    """
    global _limit
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])  # of writable memory
    except OSError:
        yield
        return
    import resource  # not on Windows

    before = resource.getrlimit(resource.RLIMIT_DATA)
    _limit = pages * resource.getpagesize() + num_bytes
    allow(0)
    try:
        yield
    finally:
        _limit = None
        resource.setrlimit(resource.RLIMIT_DATA, before)


def allow(num_bytes: int) -> None:
    """Let the process allocate this much beyond its limit, in place of what was allowed before."""
    if _limit is None:
        return
    import resource

    limit, (_, most) = _limit + num_bytes, resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(OSError, ValueError):  # a sandbox that does not let it be limited
        resource.setrlimit(resource.RLIMIT_DATA, (limit if most < 0 else min(limit, most), most))
