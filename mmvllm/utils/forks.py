"""Forks of a process: they have a copy of its memory, and none of its threads, for which every call would wait."""

import os


class OwnProcess:
    """The process in which an engine was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is not a fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise RuntimeError in a fork."""
        if not self.is_here:
            raise RuntimeError(
                f"this model was loaded in process {self._pid}, and process {os.getpid()} is a fork, in which the "
                "threads of its engine do not run; load it after the fork, or start processes by 'spawn'"
            )
