"""Detect forks of an engine's process: a fork copies its memory but not its threads, so every call would hang."""

import os


class OwnProcess:
    """The process in which an engine was created."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the current process is that process, and not a fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise RuntimeError in a fork."""
        if not self.is_here:
            raise RuntimeError(
                f"this model was loaded in process {self._pid}, and process {os.getpid()} is a fork without the "
                "threads of its engine; load it after the fork, or start processes with 'spawn'"
            )
