"""Atomic replacement of files.

Other programs may write to the folder meanwhile: what is written goes to the file that was made, never to what may have
its name by then.
"""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import xxhash

from mmvllm.errors import ArgumentError


@contextmanager
def replacing(path: Path, mode: str = "w", newline: str = "\n", synced: bool = False) -> Iterator[IO]:
    """A new file to write to, which replaces `path`, also a symbolic link, if nothing is raised.

    In a text file, UTF-8, characters that cannot be encoded are escaped: names of files need not be Unicode. With
    `synced` the file is flushed to the disk first.
    """
    temporary, descriptor = _new_file(path)
    try:
        text = {} if "b" in mode else {"encoding": "utf-8", "errors": "backslashreplace", "newline": newline}
        with open(descriptor, mode, **text) as file:
            yield file
            file.flush()
            if synced:
                os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(target: Path) -> Path:
    """The path at which a file is written before it replaces `target`."""
    return target.with_name(f".{xxhash.xxh3_64_hexdigest(os.fsencode(target.name))}.tmp")


def _new_file(target: Path) -> tuple[Path, int]:
    """An empty file in the folder of another one, which nothing else has made: no link is followed, no pipe opened.

    Its name is short, because the target's may be as long as the file system allows, and the same each time, so that a
    run that is killed leaves one file at most.
    """
    path = temporary_path(target)
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder
        path = target.with_name(f".{secrets.token_hex(8)}.tmp")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)  # Windows would change the ends of lines
    return path, os.open(path, flags, 0o666)


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
