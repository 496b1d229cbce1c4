"""Atomic replacement of files."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from mmvllm.errors import ArgumentError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to, of a new file; it replaces `path`, also a symbolic link, if nothing is raised."""
    temporary = _new_file(path)
    try:
        yield temporary
        temporary.replace(path)
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


def check_regular(path: Path) -> None:
    """Raise ArgumentError for a path that is there, and no regular file.

    A folder that comes from others may have a link to any file in the place of an output, or a pipe without an end.
    """
    try:
        is_regular = stat.S_ISREG(path.lstat().st_mode)
    except OSError:  # said when it is opened
        return
    if not is_regular:
        raise ArgumentError("{path} is not a regular file; give the file itself, or another name", path=path)


def sync(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("r+b") as file:  # Windows flushes only what may be written to
        os.fsync(file.fileno())
