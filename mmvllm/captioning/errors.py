"""What ends a job before its time."""


class JobError(RuntimeError):
    """The job cannot go on, for want of disk space most likely; what is recorded is whole, and can be gone on from."""
