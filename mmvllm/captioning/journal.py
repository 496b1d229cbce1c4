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

from mmvllm.captioning.index import Index
from mmvllm.captioning.settings import CaptionSettings

logger = logging.getLogger(__name__)
SYNC_SECONDS = 1.0


class OutputError(RuntimeError):
    """The output cannot be written any further; what is in it is whole."""


class Journal:
    """Args:
        path: the file; it is locked as long as the journal is open.
        overwrite: begin anew; what is there goes when `begin` is called, not before.
        append_anyway: add to a file that was made with other settings.

    Raises ValueError where another run has the file, or made it with other settings; OSError where it cannot be opened.
    """

    def __init__(self, path: Path, settings: CaptionSettings, overwrite: bool = False, append_anyway: bool = False):
        self.path, self.index = path, Index()
        self._settings, self._overwrite = settings, overwrite
        self._target = Path(os.path.realpath(path))  # a link stays one
        self._settings_path = self._target.with_name(f"{self._target.name}.settings")
        self._num_lines, self._size, self._synced = 0, 0, time.monotonic()
        self._has_superseded = False
        self._file = _open_locked(self._target, path)
        try:
            self._known = {} if overwrite or self._is_empty() else self._read_settings(append_anyway)
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Make the file ready to be appended to, and learn what is in it."""
        if self._overwrite:
            os.ftruncate(self._file, 0)
        self._learn()
        if self._has_superseded:  # an earlier run that did failures again was killed
            self._drop_superseded()
        self._write_settings()

    def append(self, record: dict) -> None:
        """Write one record; raises OutputError, and leaves no half of it, where that fails."""
        # What UTF-8 cannot hold (file names need not be Unicode), backslashreplace writes as JSON's own escapes.
        line = f"{json.dumps(record, ensure_ascii=False)}\n".encode("utf-8", "backslashreplace")
        try:
            _write_all(self._file, line)
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self._sync()
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise OutputError(f"{self.path} cannot be written: {error.strerror}") from error
        self._size += len(line)
        self._note(record)

    def records(self) -> Iterator[dict]:
        """All records, one for each piece of work: the last, where a failure was done again."""
        for number, line in enumerate(self._lines()):
            record = json.loads(line)
            if self.index.line(record["key"]) == number:
                yield record

    def close(self) -> None:
        """Let go of the file; one that stayed empty is taken away."""
        if self._file is None:
            return
        if self._has_superseded:
            self._drop_superseded()
        if self._is_empty():
            self._target.unlink(missing_ok=True)
            self._settings_path.unlink(missing_ok=True)
        else:
            self._sync()
        os.close(self._file)
        self._file = None

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

    def _write_settings(self) -> None:
        known = self._known | {self._settings.fingerprint: asdict(self._settings)}
        temporary = self._settings_path.with_name(f"{self._settings_path.name}.tmp")
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(known, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._settings_path)

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
                raise ValueError(
                    f"{self.path}: line {self._num_lines + 1} is not a record of a caption; mend it or take it out, "
                    "or --overwrite to begin anew"
                )
            self._size += len(line)
            self._note(record)
            self._settings.keep_caption(record, self.index)

    def _note(self, record: dict) -> None:
        is_new = self.index.note(record["key"], record["error"] is not None, self._num_lines)
        self._has_superseded |= not is_new
        self._num_lines += 1

    def _drop_superseded(self) -> None:
        """Write the file anew without the failures that were done again."""
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

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = time.monotonic()


def _parse(line: bytes) -> dict | None:
    """A record, or None for what is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return (
        record if isinstance(record, dict) and {"key", "error", "duplicate_of", "settings"} <= record.keys() else None
    )


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
