"""Stores the state of every task by key, and captions by image content, on disk to save memory.

The index is a private temporary SQLite database, deleted with the process; the journal is the permanent copy.
"""

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.settings import CaptionSettings

BEGUN, RECORDED, FAILED = range(3)
KEY_BYTES = 16


class Index:
    """The index of one run. The thread that finds images claims tasks, and the engine's thread stores their results."""

    def __init__(self):
        self._lock = threading.Lock()
        # Without a name, SQLite creates a temporary file as soon as its cache is full.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._execute("PRAGMA synchronous = OFF")
        self._execute("PRAGMA journal_mode = OFF")
        self._execute("CREATE TABLE work (key TEXT PRIMARY KEY, state INTEGER, offset INTEGER) WITHOUT ROWID")
        self._execute("CREATE TABLE files (name TEXT PRIMARY KEY, key TEXT, path BLOB) WITHOUT ROWID")
        self._execute("CREATE TABLE captions (content TEXT PRIMARY KEY, record TEXT) WITHOUT ROWID")

    def claim(self, key: str, retry: bool = False) -> bool:
        """Mark a task as begun. Return False if it was begun or recorded before, or with `retry` if it did not fail."""
        if retry:
            changed = self._execute(
                "UPDATE work SET state = ? WHERE key = ? AND state = ? RETURNING 1", BEGUN, key, FAILED
            )
        else:
            changed = self._execute("INSERT OR IGNORE INTO work VALUES (?, ?, NULL) RETURNING 1", key, BEGUN)
        return bool(changed)

    def note(self, key: str, failed: bool, offset: int) -> bool:
        """Store a task's state and where its record begins in the output. Return False if it replaces a record."""
        earlier = self.offset(key)
        self._execute("INSERT OR REPLACE INTO work VALUES (?, ?, ?)", key, FAILED if failed else RECORDED, offset)
        return earlier is None

    def move(self, key: str, offset: int) -> None:
        """Change where the record of a task begins."""
        self._execute("UPDATE work SET offset = ? WHERE key = ?", offset, key)

    def offset(self, key: str) -> int | None:
        """Return where the last record of the task begins in the output, in bytes; None if there is none."""
        rows = self._execute("SELECT offset FROM work WHERE key = ?", key)
        return rows[0][0] if rows else None

    def count_failed(self) -> int:
        """Return the number of recorded tasks that failed."""
        return self._execute("SELECT count(*) FROM work WHERE state = ?", FAILED)[0][0]

    def has_failed(self, key: str) -> bool:
        """Return whether the task is recorded as failed."""
        return bool(self._execute("SELECT 1 FROM work WHERE key = ? AND state = ?", key, FAILED))

    def dump(self, retry: bool) -> bytes:
        """Serialize the recorded tasks, or with `retry` only failed ones, for `load` in another process.

        Each entry has a key (16 bytes) and a state (1 byte).
        """
        rows = self._execute("SELECT key, state FROM work WHERE state >= ?", FAILED if retry else RECORDED)
        return b"".join(bytes.fromhex(key) + bytes([state]) for key, state in rows)

    def load(self, tasks: bytes) -> None:
        """Add the tasks that `dump` returned."""
        for i in range(0, len(tasks), KEY_BYTES + 1):
            key, state = tasks[i : i + KEY_BYTES].hex(), tasks[i + KEY_BYTES]
            self._execute("INSERT OR IGNORE INTO work VALUES (?, ?, NULL)", key, state)

    def keep_caption(self, content: str, record: dict) -> None:
        """Store the record to copy for images with the same content, unless one is stored already."""
        self._execute("INSERT OR IGNORE INTO captions VALUES (?, ?)", content, json.dumps(record))

    def caption(self, content: str) -> dict | None:
        """Return the stored record for images with this content, or None."""
        rows = self._execute("SELECT record FROM captions WHERE content = ?", content)
        return json.loads(rows[0][0]) if rows else None

    def claim_file(self, name: str, key: str, path: Path) -> bool:
        """Reserve a caption file for a task; return False if another task has it. `name` identifies the path."""
        self._execute("INSERT OR IGNORE INTO files VALUES (?, ?, ?)", name, key, os.fsencode(path))
        return self._execute("SELECT key FROM files WHERE name = ?", name) == [(key,)]

    def is_file_claimed(self, name: str) -> bool:
        """Return whether a task has this caption file."""
        return bool(self._execute("SELECT 1 FROM files WHERE name = ?", name))

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield the keys of captioned tasks and the paths of their caption files."""
        query = "SELECT name, key, path FROM files JOIN work USING (key) WHERE state = ? AND name > ?"
        rows = [("", "", b"")]
        while rows := self._execute(f"{query} ORDER BY name LIMIT 1000", RECORDED, rows[-1][0]):
            yield from ((key, Path(os.fsdecode(path))) for _, key, path in rows)

    def _execute(self, query: str, *values: str | int | bytes) -> list[tuple]:
        try:
            with self._lock:
                return self._database.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:
            raise JobError(
                f"the index of finished images cannot be written to the folder for temporary files ({error}); free "
                "space there, or set SQLITE_TMPDIR to another folder"
            ) from error


def keep_caption(settings: CaptionSettings, index: Index, record: dict) -> None:
    """Store a record to copy for images with the same content, unless it failed, is a copy, or is not repeatable."""
    is_original = record["error"] is None and record["duplicate_of"] is None
    if is_original and settings.is_repeatable:
        index.keep_caption(settings.content_key(record["digest"], record["prompt"]), record)
