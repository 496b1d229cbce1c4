"""Errors that end a captioning job."""

from collections.abc import Sequence
from os import PathLike


class JobError(RuntimeError):
    """The job cannot continue, for example because the disk is full. The output is intact, and the job can be resumed.

    Args:
        reason: what failed, and what to do about it.
        path: the file that could not be written, if one is the cause.
        errno: the operating system's error number, if there is one.
        unrecorded: paths of the images that were being captioned and have no record.
    """

    def __init__(
        self,
        reason: str,
        *,
        path: str | PathLike | None = None,
        errno: int | None = None,
        unrecorded: Sequence[str] = (),
    ):
        super().__init__(reason)
        self.reason, self.path, self.errno, self.unrecorded = reason, path, errno, list(unrecorded)

    @classmethod
    def cannot_write(cls, path: str | PathLike, error: OSError, hint: str = "") -> "JobError":
        """The error for a file that could not be written."""
        return cls(f"{path} cannot be written: {error.strerror}{hint}", path=path, errno=error.errno)
