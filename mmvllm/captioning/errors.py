"""Errors that end a captioning job."""

import errno
from collections.abc import Sequence
from os import PathLike

_ADVICE = {
    errno.EACCES: "choose a place where you may write, or change its permissions",
    errno.EDQUOT: "free space there, or ask for a larger quota",
    errno.EFBIG: "the file has reached the largest size that is allowed; write to another output",
    errno.EIO: "the disk may be failing; choose another one",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOSPC: "free space there",
    errno.EPERM: "choose a place where you may write",
    errno.EROFS: "choose a place where files can be written, or mount it with write access",
}


class JobError(RuntimeError):
    """The job cannot continue, for example because the disk is full. The output is intact, and the job can be resumed.

    Args:
        reason: what failed, and what to do about it.
        path: the file that could not be written, if that is the cause.
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
        """Return the error for a file that could not be written."""
        return cls(f"{path} cannot be written: {explained(error)}{hint}", path=path, errno=error.errno)


def explained(error: OSError) -> str:
    """Return the operating system's reason without the error number, with advice where there is any."""
    reason, advice = error.strerror or str(error), _ADVICE.get(error.errno)
    return f"{reason}; {advice}" if advice else reason
