"""The folder of caption files: made when a job begins, and watched while it runs."""

import os
from contextlib import suppress
from pathlib import Path

from mmvllm.captioning.errors import JobError, explained
from mmvllm.errors import ArgumentError


class OutputFolder:
    """The folder at `path`, or nothing if it is None."""

    def __init__(self, path: Path | None):
        self.path = path
        self._is_new = False
        self._identity: os.stat_result | None = None

    def make(self) -> None:
        """Make the folder if it is missing; raises ArgumentError if that fails."""
        if self.path is None:
            return
        try:
            self._is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._identity = self.path.stat()
        except OSError as error:
            raise ArgumentError(
                "{output_dir} {path} cannot be made: {reason}", path=self.path, reason=explained(error)
            ) from error

    def check(self) -> None:
        """Raise JobError if the folder was removed or replaced since it was made."""
        if self._identity is None:
            return
        try:
            is_same = os.path.samestat(self._identity, self.path.stat())
        except OSError:
            is_same = False
        if not is_same:
            raise JobError(
                f"{self.path} was removed or replaced by another program while this run was writing caption files to "
                "it; put it back, or run the same job again, which writes the files of all recorded images",
                path=self.path,
            )

    def remove_if_new(self) -> None:
        """Remove the folder if this job has made it and nothing is in it."""
        if self._is_new:
            with suppress(OSError):  # it is not empty
                self.path.rmdir()
