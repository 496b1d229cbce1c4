"""The journal of a job: an append-only file of JSON lines, from which later runs resume.

Each record is written in full before the next one, and synced to the disk within a second while others follow. If the
process is killed, only the last line can be incomplete, and the next run removes it. The settings of the records are in
the file `NAME.settings` beside the journal.
"""

import itertools
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.multi_prompt import LIST, caption_columns
from mmvllm.captioning.outputs.atomic_write import check_regular
from mmvllm.captioning.outputs.index import Index, keep_caption
from mmvllm.captioning.outputs.locked_file import LockedFile
from mmvllm.captioning.outputs.record import MAX_LINE_BYTES, as_line, parse_record, read_line
from mmvllm.captioning.outputs.settings_file import SettingsFile
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.errors import ArgumentError
from mmvllm.sampling_params import MAX_COMPLETIONS
from mmvllm.utils.text import counted

logger = logging.getLogger(__name__)
SYNC_SECONDS = 1.0


class Journal:
    """The open journal of a run, with an index of its records.

    Args:
        path: the file; it is locked while the journal is open.
        overwrite: replace the file; its content is kept until the first record is written.
        append_anyway: append to a file that was made with other settings.

    Raises ArgumentError if the file has other settings, is not a journal or cannot be opened, and ValueError if another
    run has locked it. Methods raise JobError if the file cannot be read or written, or another program changed it.
    """

    def __init__(self, path: Path, settings: CaptionSettings, overwrite: bool = False, append_anyway: bool = False):
        self.path, self.index = path, Index()
        self._settings, self._overwrite = settings, overwrite
        self.made_with = SettingsFile(path.with_name(f"{path.name}.settings"), path)
        for one in (path, self.made_with.path):
            check_regular(one)
        self._num_lines, self._num_earlier_bytes, self._synced = 0, 0, time.monotonic()
        self.is_synced = True
        self._has_begun = self._has_superseded = self._is_lost = self._has_unnamed = False
        self._file = LockedFile(path)
        try:
            if self._file.size and not overwrite:
                self.made_with.read()
                if not append_anyway:
                    self.made_with.check(settings)
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[Path, Path]:
        """The journal's file and its settings file."""
        return self._file.path, self.made_with.path

    @property
    def has_records(self) -> bool:
        """Whether the file has records that this run does not overwrite."""
        return self._file.size > 0 and (self._has_begun or not self._overwrite)

    def is_own(self, record: dict) -> bool:
        """Return whether a record was made with the settings of this run."""
        return record["settings"] == self._settings.fingerprint

    def begin(self) -> None:
        """Read the existing records into the index, unless they are to be overwritten."""
        if not self._overwrite:
            with _as_job_error(self.path):
                self._read_records()
                if self._has_superseded:
                    self._drop_superseded()
            self._num_earlier_bytes = self._file.size

    def append(self, record: dict) -> None:
        """Write one record; if that fails, remove the incomplete line and raise JobError."""
        line = f"{as_line(record)}\n".encode()
        if not self._has_begun:
            self._begin_writing()
        offset = self._file.size
        with _as_job_error(self.path):
            self._file.append(line)
        self._index_record(record, offset)
        self.is_synced = False
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flush all records to the disk, and check that the journal's path still leads to this file."""
        with _as_job_error(self.path):
            self._file.sync()
            self.check()
            self._synced, self.is_synced = time.monotonic(), True

    def check(self) -> None:
        """Raise JobError if another program has deleted, replaced or changed the file."""
        if not self.has_records or self._is_lost:
            return  # nothing can be lost, or the loss is already reported
        if (happened := self._file.what_happened()) is not None:
            self._is_lost = True
            raise JobError(
                f"{self.path} {happened} by another program while this run was writing to it, and with it "
                f"{counted(self._num_lines, 'record')}; put the file back, or run the same job again, which "
                "captions the images without a record",
                path=self.path,
            )
        if self._has_begun and not self.made_with.path.exists():
            self.made_with.write(self._settings)

    def records(self) -> Iterator[dict]:
        """Yield one record per task: the last one, if a failed task was retried."""
        if self._overwrite and not self._has_begun:
            return
        for offset, line in self._lines():
            record = read_line(line)
            if self.index.offset(record["key"]) == offset:
                yield record

    def was_captioned(self, key: str) -> bool:
        """Return whether an earlier run has recorded a task with a caption."""
        offset = self.index.offset(key)
        return offset is not None and offset < self._num_earlier_bytes and not self.index.has_failed(key)

    def record(self, key: str) -> dict:
        """Return the last record of a recorded task."""
        return read_line(next(self._lines(self.index.offset(key)))[1])

    def caption_columns(self) -> list[str]:
        """Return the table columns for jobs with several captions per image, at most `MAX_COMPLETIONS`."""
        of_jobs = ((values.get("prompts") or [], values.get("n", 1)) for values in self.made_with.known.values())
        unnamed = [None] if self._has_unnamed else []  # for images with a prompt from a list
        columns = (caption_columns([one["name"] for one in prompts] + unnamed or [None], n) for prompts, n in of_jobs)
        return list(dict.fromkeys(itertools.islice(itertools.chain.from_iterable(columns), MAX_COMPLETIONS)))

    def close(self) -> None:
        """Close and unlock the file; delete it if it is empty."""
        if not self._file.is_open:
            return
        try:
            self.check()
            if self._has_superseded and not self._is_lost:
                self._drop_superseded()
            if self._file.size:
                self._file.sync()
            else:
                self.made_with.path.unlink(missing_ok=True)
                self._file.delete()
        except OSError as error:  # superseded records stay in the file; the next run removes them
            logger.warning("%s: superseded records cannot be removed: %s", self.path, error.strerror)
        finally:
            self._file.close()

    def _begin_writing(self) -> None:
        with _as_job_error(self.path):
            if self._overwrite:
                self._file.truncate(0)
        with _as_job_error(self.made_with.path):
            self.made_with.write(self._settings)
        self._has_begun = True

    def _read_records(self) -> None:
        """Read the records into the index; end the last line, or remove it if its record is incomplete."""
        for offset, line in self._lines():
            is_last = not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES
            record = parse_record(line)
            if record is None and is_last:
                logger.warning(
                    "%s: the last line is incomplete and is removed; its image is captioned again", self.path
                )
                self._file.truncate(offset)
                return
            if record is None:
                self._has_superseded = False  # leaves the file unchanged
                raise ArgumentError(
                    "{path}: line {line} is not a record of a caption; correct or delete the line, or start again with "
                    "{overwrite}",
                    path=self.path,
                    line=self._num_lines + 1,
                )
            self._read_record(record, offset)
            if is_last:
                self._file.append(b"\n")
                return

    def _read_record(self, record: dict, offset: int) -> None:
        if record["error"] is not None and record["finish_reason"] is None:
            # Not an image but a folder, tar or line that could not be read: every run retries it.
            self._num_lines, self._has_superseded = self._num_lines + 1, True
            return
        self._index_record(record, offset)
        if self.is_own(record):
            keep_caption(self._settings, self.index, record)

    def _index_record(self, record: dict, offset: int) -> None:
        has_failed = record["error"] is not None and self.is_own(record)
        self._has_unnamed |= any(one["name"] is None for one in record.get(LIST, ()))
        is_new = self.index.note(record["key"], has_failed, offset)
        self._has_superseded |= not is_new
        self._num_lines += 1

    def _drop_superseded(self) -> None:
        """Rewrite the file without the failures that were or will be retried."""
        target = self._file.path
        temporary = target.with_name(f"{target.name}.tmp")
        temporary.unlink(missing_ok=True)
        file = LockedFile(temporary, is_new=True)
        try:
            for offset, line in self._lines():
                if self.index.offset(json.loads(line)["key"]) == offset:
                    file.append(line)
            file.sync()
            self._file.take_over(file)
        finally:
            file.close()
        self._num_lines, self._has_superseded = 0, False
        for offset, line in self._lines():
            self.index.move(json.loads(line)["key"], offset)
            self._num_lines += 1

    def _lines(self, offset: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the lines from `offset` on, with the offset of each."""
        if not self.path.exists():  # the journal was closed without a record
            return
        with self.path.open("rb") as file:
            file.seek(offset)
            while line := file.readline(MAX_LINE_BYTES + 1):  # a file from someone else may be one endless line
                yield offset, line
                offset += len(line)


@contextmanager
def _as_job_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobError.cannot_write(path, error) from error
