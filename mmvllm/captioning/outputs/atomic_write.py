"""Atomic replacement of files.

Other programs may write to the folder at the same time. Data goes only to the new file, never to another file that has
taken its name meanwhile.
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
    """Open a new file that replaces `path`, even if that is a symbolic link, unless an exception is raised.

    Text files are UTF-8; characters that cannot be encoded are escaped, because file names need not be Unicode. With
    `synced`, the file is flushed to the disk first.
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
    """Return the path at which a file is written before it replaces `target`."""
    return target.with_name(f".{xxhash.xxh3_64_hexdigest(os.fsencode(target.name))}.tmp")


def _new_file(target: Path) -> tuple[Path, int]:
    """Create an empty file beside `target`, exclusively: no link is followed, and no pipe is opened.

    Its name is short, because the target's may be as long as the file system allows. The name is always the same, so
    that killed runs leave at most one file.
    """
    path = temporary_path(target)
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder has this name
        path = target.with_name(f".{secrets.token_hex(8)}.tmp")
    return path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)


def check_regular(path: Path) -> None:
    """Raise ArgumentError if something exists at a path and is not a regular file.

    In a folder from someone else, an output's name may belong to a link to any file, or to an endless pipe.
    """
    try:
        is_regular = stat.S_ISREG(path.lstat().st_mode)
    except OSError:  # missing, or opening it reports the error
        return
    if not is_regular:
        raise ArgumentError("{path} is not a regular file; give the file itself, or another name", path=path)
