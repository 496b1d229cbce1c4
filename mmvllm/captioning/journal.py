"""The output of a job: an append-only file of JSON lines, from which any later run resumes.

Each record is written in full before the next one, and synced to the disk within a second while others follow. If the
process is killed, only the last line can be incomplete, and the next run removes it. The file `NAME.settings` beside it
has the settings that the records were made with.
"""

import fcntl
import json
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.index import Index, keep_caption
from mmvllm.captioning.record import COLUMNS, as_line
from mmvllm.captioning.replacing import replacing, sync
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.errors import ArgumentError

logger = logging.getLogger(__name__)
SYNC_SECONDS = 1.0


class Journal:
    """The records of one file, and an index of them.

    Args:
        path: the file; it is locked while the journal is open.
        overwrite: replace the file; its content is kept until the first record is written.
        append_anyway: add to a file that was made with other settings.

    Raises ArgumentError if the file has other settings or is not a journal, ValueError if another run has locked it,
    and OSError if it cannot be opened.
    """

    def __init__(self, path: Path, settings: CaptionSettings, overwrite: bool = False, append_anyway: bool = False):
        self.path, self.index = path, Index()
        self._settings, self._overwrite = settings, overwrite
        self._target = Path(os.path.realpath(path))  # a symbolic link is kept
        self._settings_path = self._target.with_name(f"{self._target.name}.settings")
        self._num_lines, self._size, self._synced = 0, 0, time.monotonic()
        self.is_synced = True
        self._has_begun = self._has_superseded = False
        self._file = _open_locked(self._target, path)
        try:
            self._known = {} if overwrite or self._is_empty() else self._read_settings(append_anyway)
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[Path, Path]:
        """The files that it writes."""
        return self._target, self._settings_path

    def begin(self) -> None:
        """Read the existing records into the index, unless they are to be overwritten."""
        if not self._overwrite:
            self._read_records()
            if self._has_superseded:
                self._drop_superseded()

    def append(self, record: dict) -> None:
        """Write one record; if that fails, remove what was written of it and raise JobError."""
        line = f"{as_line(record)}\n".encode()
        try:
            if not self._has_begun:
                self._begin_writing()
            _write_all(self._file, line)
            self.is_synced = False
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self.sync()
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise JobError.cannot_write(self.path, error) from error
        self._size += len(line)
        self._index_record(record)

    def sync(self) -> None:
        """Flush all records to the disk."""
        os.fsync(self._file)
        self._synced, self.is_synced = time.monotonic(), True

    def records(self) -> Iterator[dict]:
        """The records, one per task: the last one where a failed task was tried again."""
        if self._overwrite and not self._has_begun:
            return
        for number, line in enumerate(self._lines()):
            record = json.loads(line)
            if self.index.line(record["key"]) == number:
                yield record

    def close(self) -> None:
        """Close and unlock the file; an empty one is deleted."""
        if self._file is None:
            return
        try:
            if self._has_superseded:
                self._drop_superseded()
            if self._is_empty():
                self._settings_path.unlink(missing_ok=True)
                self._target.unlink(missing_ok=True)
            else:
                self.sync()
        except OSError as error:  # superseded records stay in the file; the next run removes them
            logger.warning("%s: superseded records cannot be removed: %s", self.path, error.strerror)
        finally:
            os.close(self._file)
            self._file = None

    def _begin_writing(self) -> None:
        if self._overwrite:
            os.ftruncate(self._file, 0)
        known = self._known | {self._settings.fingerprint: self._settings.as_dict()}
        with replacing(self._settings_path) as temporary:
            with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
                json.dump(known, file, ensure_ascii=False, indent=1)
            sync(temporary)
        self._has_begun = True

    def _read_settings(self, append_anyway: bool) -> dict[str, dict]:
        """The settings that this file was made with, by fingerprint; raises ArgumentError if they differ."""
        try:
            known = json.loads(self._settings_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ArgumentError(
                "{path} exists and was not made by mmvllm ({settings} is missing); choose another "
                "{output}, or replace the file with {overwrite}",
                path=self.path,
                settings=self._settings_path.name,
            ) from None
        except ValueError as error:
            raise ArgumentError(
                "{path} is damaged ({reason}); start again with {overwrite}", path=self._settings_path, reason=error
            ) from None
        if self._settings.fingerprint not in known and not append_anyway:
            difference = self._settings.difference(list(known.values())[-1])
            raise ArgumentError(
                "{path} was made with other settings: {difference}. Choose another {output}, replace it with "
                "{overwrite}, or add records made with the new settings with {append_anyway}",
                path=self.path,
                difference="; ".join(difference),
            )
        return known

    def _read_records(self) -> None:
        """Read the records into the index, and remove an incomplete last line."""
        self._num_lines = self._size = 0
        self._has_superseded = False
        for line in self._lines():
            if not line.endswith(b"\n"):
                logger.warning(
                    "%s: the last line is incomplete and is removed; its image is captioned again", self.path
                )
                os.ftruncate(self._file, self._size)
                return
            record = _parse(line)
            if record is None:
                self._has_superseded = False  # the file stays as it is
                raise ArgumentError(
                    "{path}: line {line} is not a record of a caption; correct or delete the line, or start again with "
                    "{overwrite}",
                    path=self.path,
                    line=self._num_lines + 1,
                )
            self._size += len(line)
            if record["error"] is not None and record["finish_reason"] is None:
                # Not an image but a folder, tar or line that could not be read: every run tries it again.
                self._num_lines, self._has_superseded = self._num_lines + 1, True
            else:
                self._index_record(record)
                keep_caption(self._settings, self.index, record)

    def _index_record(self, record: dict) -> None:
        is_new = self.index.note(record["key"], record["error"] is not None, self._num_lines)
        self._has_superseded |= not is_new
        self._num_lines += 1

    def _drop_superseded(self) -> None:
        """Rewrite the file without the failures that were, or will be, tried again."""
        temporary = self._target.with_name(f"{self._target.name}.tmp")
        temporary.unlink(missing_ok=True)
        file = _open_locked(temporary, temporary)
        for number, line in enumerate(self._lines()):
            if self.index.line(json.loads(line)["key"]) == number:
                _write_all(file, line)
        os.fsync(file)
        temporary.replace(self._target)
        os.close(self._file)
        self._file = file
        self.index = Index()
        self._read_records()

    def _lines(self) -> Iterator[bytes]:
        if not self.path.exists():  # the journal was closed without a record
            return
        with self.path.open("rb") as file:
            yield from file

    def _is_empty(self) -> bool:
        return os.fstat(self._file).st_size == 0


def _parse(line: bytes) -> dict | None:
    """The record in a line, or None if there is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.keys() >= COLUMNS.keys() else None


def _open_locked(path: Path, name: Path) -> int:
    """Open for appending with an exclusive lock; messages say `name`, the path before links are resolved."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ValueError(
                f"{name}: another run is writing to it; wait for that run to end, or choose another file"
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s); make sure that no other run writes to it", name, error.strerror)
            return file
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise ValueError(f"{name} is not a regular file; records can only be written to a regular file")
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)  # replaced or deleted between the two calls


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
