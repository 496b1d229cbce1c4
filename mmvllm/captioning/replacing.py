"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` if all goes well; a link stays one."""
    target = Path(os.path.realpath(path))
    # Its name may not be longer than the target's, nor that of another process on another machine.
    temporary = target.with_name(f".{xxhash.xxh3_64_hexdigest(os.fsencode(target.name))}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file on the disk before anything else is done."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
