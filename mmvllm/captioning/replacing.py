"""Atomic replacement of files."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash


@contextmanager
def replacing(path: Path, keeps_link: bool = True) -> Iterator[Path]:
    """A temporary path to write to, of a new file; it replaces `path` if no exception is raised.

    A symbolic link is kept, and what it points to is replaced, unless `keeps_link` is false.
    """
    target = Path(os.path.realpath(path)) if keeps_link else path
    temporary = _new_file(target)
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _new_file(target: Path) -> Path:
    """An empty file in the folder of another one, which nothing else has made: no link is followed, no pipe opened.

    Its name is short, because the target's may be as long as the file system allows, and the same each time, so that a
    run that is killed leaves one file at most.
    """
    path = target.with_name(f".{xxhash.xxh3_64_hexdigest(os.fsencode(target.name))}.tmp")
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder
        path = target.with_name(f".{secrets.token_hex(8)}.tmp")
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return path


def sync(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("r+b") as file:  # Windows flushes only what may be written to
        os.fsync(file.fileno())
