"""Restores missing caption files of recorded images, after a killed run or a deletion."""

import logging
from contextlib import suppress

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.outputs.caption_files import CaptionFiles, is_missing
from mmvllm.captioning.outputs.journal import Journal
from mmvllm.captioning.sources.items import Item

logger = logging.getLogger(__name__)
NUM_NAMED = 10


class Restorer:
    """Restores the caption files of recorded images, and logs files that cannot be restored, with the reason.

    The image that a run finds determines the path of its file. The record does not, because an output may come from
    someone else, who must not choose which files are written.
    """

    def __init__(self, files: CaptionFiles, journal: Journal):
        self._files, self._journal, self._index = files, journal, journal.index
        self._problems: list[str] = []
        self._num_problems = 0

    def found(self, item: Item, key: str) -> None:
        """Restore the file of an image that an earlier run has captioned, if the file is missing."""
        if not self._journal.was_captioned(key):
            return
        try:
            path = self._files.path(item)
            if not is_missing(path):
                self._files.claim_path(path, key, self._index)
                return
            self._files.reserve(item, key, self._index)
        except (ValueError, OSError) as error:
            self._add_problem(str(error))
            return
        with suppress(JobError):  # `finish` tries again, and logs the reason
            self._files.write(self._journal.record(key), path)

    def finish(self) -> None:
        """Restore files that another program deleted during the run, and log the files that are missing."""
        num_restored = 0
        for key, path in self._index.files():
            try:
                if is_missing(path):
                    self._files.write(self._journal.record(key), path)
                    num_restored += 1
            except (OSError, JobError) as error:
                self._add_problem(str(error))
        if num_restored:
            logger.warning("caption files that were deleted during the run are written again: %d", num_restored)
        if self._num_problems:
            more = self._num_problems - len(self._problems)
            names = "\n".join((*self._problems, *([f"and {more:,} more"] if more else ())))
            logger.warning("caption files of recorded images are missing: %d\n%s", self._num_problems, names)

    def _add_problem(self, text: str) -> None:
        self._num_problems += 1
        if len(self._problems) < NUM_NAMED:
            self._problems.append(text)
