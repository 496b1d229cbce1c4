"""A locked file for appending, which detects changes by other programs."""

import fcntl
import logging
import os
from pathlib import Path

from mmvllm.captioning.errors import explained
from mmvllm.errors import ArgumentError

logger = logging.getLogger(__name__)
FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW  # a link that was put there meanwhile is not followed


class LockedFile:
    """An open file with an exclusive lock; `size` is its size in bytes unless another program has changed it.

    With `is_new`, the file must not exist yet, because another program may have put a link or a pipe there.

    Raises ValueError if another process has locked it, and ArgumentError if it cannot be opened for writing.
    """

    def __init__(self, path: Path, is_new: bool = False):
        self.path = path
        try:
            self._file: int | None = _open_locked(path, os.O_EXCL if is_new else 0)
            self.size = os.fstat(self._file).st_size
        except OSError as error:
            raise ArgumentError(
                "{path} cannot be opened for writing: {reason}", path=path, reason=explained(error)
            ) from error

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def append(self, data: bytes) -> None:
        """Append all of the data, or nothing if OSError is raised."""
        rest = data
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            self.undo_append()
            raise
        self.size += len(data)

    def undo_append(self) -> None:
        """Truncate the file to `size`, if the file system allows it."""
        try:
            os.ftruncate(self._file, self.size)
        except OSError as error:  # the next run removes an incomplete line
            logger.warning("%s: an incomplete record cannot be removed: %s", self.path, error.strerror)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._file, size)
        self.size = size

    def sync(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self._file)

    def what_happened(self) -> str | None:
        """Return what another program did to the file since it was opened, or None."""
        status = os.fstat(self._file)
        try:
            is_same = os.path.samestat(status, os.stat(self.path))
        except OSError:
            is_same = False
        if not status.st_nlink:
            return "was deleted"
        if not is_same:
            return "was moved or replaced"
        return None if status.st_size == self.size else "was changed"

    def take_over(self, new: "LockedFile") -> None:
        """Replace this file by `new`; the path stays locked."""
        new.path.replace(self.path)
        self.close()
        self._file, new._file, self.size = new._file, None, new.size

    def delete(self) -> None:
        """Delete and close the file."""
        self.path.unlink(missing_ok=True)  # while it is locked
        self.close()

    def close(self) -> None:
        """Close and unlock the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open_locked(path: Path, more_flags: int = 0) -> int:
    while True:
        file = os.open(path, FLAGS | more_flags, 0o666)
        try:
            _lock(file, path)
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # replaced or deleted between the two calls


def _lock(file: int, name: Path) -> None:
    """Lock the file until it is closed; raises ValueError if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(
            f"{name}: another run is writing to it; wait for that run to end, or choose another file"
        ) from None
    except OSError as error:  # some network file systems have no locks
        logger.warning("%s cannot be locked (%s); make sure that no other run writes to it", name, error.strerror)
