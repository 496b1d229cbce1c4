"""Atomic replacement of files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it replaces `path` if no exception is raised. A symbolic link is kept."""
    target = Path(os.path.realpath(path))
    # The name is short, because the target's may be as long as the file system allows.
    temporary = target.with_name(f".{xxhash.xxh3_64_hexdigest(os.fsencode(target.name))}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("r+b") as file:  # Windows flushes only what may be written to
        os.fsync(file.fileno())
