"""Restores missing caption files from the records of an output, after a killed run or a deletion."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.outputs.caption_files import MAX_FOLDERS, CaptionFiles
from mmvllm.captioning.outputs.journal import Journal
from mmvllm.captioning.settings import output_dir_of
from mmvllm.captioning.sources.items import Item

logger = logging.getLogger(__name__)
NUM_NAMED = 10


class Restorer:
    """Restores the caption files of an output, and logs files that cannot be restored, with the reason."""

    def __init__(self, files: CaptionFiles, journal: Journal):
        self._files, self._journal = files, journal
        self._folders = list(journal.made_with.folders)  # the working directories of earlier runs
        self._num_earlier = 0
        self._problems: list[str] = []
        self._num_problems = 0

    def begin(self) -> None:
        """Restore the files of earlier runs; a file with an uncertain path waits until its image is found."""
        for record in self._own_records():
            self._num_earlier += 1
            path = self._path(record)
            if path is None:
                self._journal.index.defer(record)
            else:
                self._files.claim_path(path, self._journal.index)
                self._restore(record, path)
        self._problems, self._num_problems = [], 0  # `finish` finds them again

    def found(self, item: Item, key: str) -> None:
        """Restore the file of a recorded image that this run has found."""
        record = self._journal.index.take_deferred(key)
        if record is not None and (path := self._files.path(item)) is not None:
            self._files.claim_path(path, self._journal.index)
            self._restore(record, path)

    def finish(self) -> None:
        """Restore files that another program deleted during the run, and log the files that are still missing."""
        num_restored = 0
        for number, record in enumerate(self._own_records()):
            path = self._path(record) if number < self._num_earlier else Path(record["file"])
            if path is not None:
                num_restored += self._restore(record, path)
        if num_restored:
            logger.warning("caption files that were deleted during the run are written again: %d", num_restored)
        for record in self._journal.index.deferred():
            if not any(os.path.exists(os.path.join(folder, record["file"])) for folder in (".", *self._folders)):
                self._add_problem(f"{record['file']}: its image was not found by this run")
        self._report()

    def _own_records(self) -> Iterator[dict]:
        records = self._journal.records()
        return (one for one in records if one["file"] and one["error"] is None and self._journal.is_own(one))

    def _path(self, record: dict) -> Path | None:
        """Return the path of a record's caption file; None if it is uncertain, for example if the image is missing.

        An output may come from someone else together with the images, so it must not choose which files are written.
        """
        path, image = Path(record["file"]), Path(os.path.expanduser(record["path"]))
        if not self._files.is_name_for(path.name, image.name) or not os.path.lexists(image):
            return None
        if self._files.output_dir is not None:
            # The earlier run may have named the folder in another way, from another working directory.
            made_with = self._journal.made_with.known.get(record["settings"], {})
            folder = output_dir_of(made_with.get("caption_files"))
            if folder is None or not path.is_relative_to(folder):
                return None
            inside = path.relative_to(folder)
            is_hidden = any(part.startswith(".") for part in inside.parts)  # also ".."
            is_deep = len(inside.parts) > MAX_FOLDERS + 1  # no file is written that deep
            return None if is_hidden or is_deep else self._files.output_dir / inside
        is_from_here = path.is_absolute() or not self._folders or os.getcwd() in self._folders
        is_beside = path.parent in (image.parent, Path(record["path"]).parent)
        return path if is_from_here and is_beside else None

    def _restore(self, record: dict, path: Path) -> bool:
        """Write the file if it is missing or empty; return whether it was written."""
        try:
            if path.is_file() and path.stat().st_size:  # a power failure may leave an empty file
                return False
            self._files.write(record, path)
        except (JobError, OSError) as error:
            self._add_problem(str(error))
            return False
        return True

    def _add_problem(self, text: str) -> None:
        self._num_problems += 1
        if len(self._problems) < NUM_NAMED:
            self._problems.append(text)

    def _report(self) -> None:
        if self._num_problems:
            more = self._num_problems - len(self._problems)
            names = "\n".join((*self._problems, *([f"and {more:,} more"] if more else ())))
            logger.warning("caption files of recorded images are missing: %d\n%s", self._num_problems, names)
