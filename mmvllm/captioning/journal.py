"""The output of a job: a file of JSON lines, only ever appended to, from which any later run goes on.

A record is written whole and at once, and flushed to the disk within a second while others come. Whatever kills the
process, the file holds whole records but for its last line, which the next run cuts off. Beside it, `NAME.settings`
says with which settings it was made.
"""

import fcntl
import json
import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.index import Index, keep_caption
from mmvllm.captioning.record import COLUMNS
from mmvllm.captioning.replacing import replacing, sync
from mmvllm.captioning.settings import CaptionSettings

logger = logging.getLogger(__name__)
SYNC_SECONDS = 1.0


class Journal:
    """The records of one file, and the index of what they say.

    Args:
        path: the file; it is locked as long as the journal is open.
        overwrite: begin anew; what is there goes when the first record comes, not before.
        append_anyway: add to a file that was made with other settings.

    Raises ValueError where another run has the file, or made it with other settings; OSError where it cannot be opened.
    """

    def __init__(self, path: Path, settings: CaptionSettings, overwrite: bool = False, append_anyway: bool = False):
        self.path, self.index = path, Index()
        self._settings, self._overwrite = settings, overwrite
        self._target = Path(os.path.realpath(path))  # a link stays one
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
        """What it writes."""
        return self._target, self._settings_path

    def begin(self) -> None:
        """Learn what is recorded; nothing, where it is to be overwritten."""
        if not self._overwrite:
            self._learn()
            if self._has_superseded:
                self._drop_superseded()

    def append(self, record: dict) -> None:
        """Write one record; raises JobError, and leaves no half of it, where that fails."""
        # What UTF-8 cannot hold (file names need not be Unicode), backslashreplace writes as JSON's own escapes.
        line = f"{json.dumps(record, ensure_ascii=False)}\n".encode("utf-8", "backslashreplace")
        try:
            if not self._has_begun:
                self._make_ready()
            _write_all(self._file, line)
            self.is_synced = False
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self.sync()
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise JobError(f"{self.path} cannot be written: {error.strerror}") from error
        self._size += len(line)
        self._note(record)

    def sync(self) -> None:
        """Have all records on the disk."""
        os.fsync(self._file)
        self._synced, self.is_synced = time.monotonic(), True

    def records(self) -> Iterator[dict]:
        """All records, one for each piece of work: the last, where a failure was done again."""
        if self._overwrite and not self._has_begun:
            return
        for number, line in enumerate(self._lines()):
            record = json.loads(line)
            if self.index.line(record["key"]) == number:
                yield record

    def close(self) -> None:
        """Let go of the file; one that stayed empty is taken away."""
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
        except OSError as error:  # failures that were done again stand there twice; the next run sees to it
            logger.warning("%s cannot be put in order: %s", self.path, error.strerror)
        finally:
            os.close(self._file)
            self._file = None

    def _make_ready(self) -> None:
        if self._overwrite:
            os.ftruncate(self._file, 0)
        known = self._known | {self._settings.fingerprint: asdict(self._settings)}
        with replacing(self._settings_path) as temporary:
            with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
                json.dump(known, file, ensure_ascii=False, indent=1)
            sync(temporary)
        self._has_begun = True

    def _read_settings(self, append_anyway: bool) -> dict[str, dict]:
        """The settings that this file was made with, by fingerprint; refuses those that differ."""
        try:
            known = json.loads(self._settings_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} exists and was not made by this command ({self._settings_path.name} is missing); "
                "choose another output, or --overwrite"
            ) from None
        except ValueError as error:
            raise ValueError(f"{self._settings_path} is damaged ({error}); --overwrite begins anew") from None
        if self._settings.fingerprint not in known and not append_anyway:
            difference = self._settings.difference(list(known.values())[-1])
            raise ValueError(
                f"{self.path} was made with other settings: {'; '.join(difference)}. Choose another output, "
                "or --overwrite to begin anew, or --append-anyway to add records made with the new settings"
            )
        return known

    def _learn(self) -> None:
        """Read what is recorded, and cut off a last line that was not written to its end."""
        self._num_lines = self._size = 0
        self._has_superseded = False
        for line in self._lines():
            if not line.endswith(b"\n"):
                logger.warning("%s: its last line was not written to the end, and is done again", self.path)
                os.ftruncate(self._file, self._size)
                return
            record = _parse(line)
            if record is None:
                self._has_superseded = False  # the file stays as it is
                raise ValueError(
                    f"{self.path}: line {self._num_lines + 1} is not a record of a caption; mend it or take it out, "
                    "or --overwrite to begin anew"
                )
            self._size += len(line)
            if record["error"] is not None and record["finish_reason"] is None:
                # No picture but a place that could not be read: every run looks again, and says what it finds.
                self._num_lines, self._has_superseded = self._num_lines + 1, True
            else:
                self._note(record)
                keep_caption(self._settings, self.index, record)

    def _note(self, record: dict) -> None:
        is_new = self.index.note(record["key"], record["error"] is not None, self._num_lines)
        self._has_superseded |= not is_new
        self._num_lines += 1

    def _drop_superseded(self) -> None:
        """Write the file anew without the failures that were, or will be, looked at again."""
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
        self._learn()

    def _lines(self) -> Iterator[bytes]:
        if not self.path.exists():  # closed, and nothing was recorded
            return
        with self.path.open("rb") as file:
            yield from file

    def _is_empty(self) -> bool:
        return os.fstat(self._file).st_size == 0


def _parse(line: bytes) -> dict | None:
    """A record, or None for what is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.keys() >= COLUMNS.keys() else None


def _open_locked(path: Path, name: Path) -> int:
    """Open for appending, for this process alone; `name` is what its user calls it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ValueError(f"{name}: another run is writing to it; wait for it, or choose another output") from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s); see to it that no other run writes to it", name, error.strerror)
            return file
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise ValueError(f"{name} is not a plain file; records must go into one")
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)  # replaced or taken away between the two calls


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
