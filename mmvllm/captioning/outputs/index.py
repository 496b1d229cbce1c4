"""Stores the state of every task by key, and captions by image content, on disk to save memory.

The index is a private temporary SQLite database, deleted with the process; the journal is the permanent copy.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator

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
        self._execute("CREATE TABLE work (key TEXT PRIMARY KEY, state INTEGER, line INTEGER) WITHOUT ROWID")
        self._execute("CREATE TABLE names (name TEXT PRIMARY KEY, key TEXT) WITHOUT ROWID")
        self._execute("CREATE TABLE unplaced (key TEXT PRIMARY KEY, record TEXT) WITHOUT ROWID")
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

    def note(self, key: str, failed: bool, line: int) -> bool:
        """Store a task's state and its line in the output. Return False if an earlier line has a record of the task."""
        earlier = self.line(key)
        self._execute("INSERT OR REPLACE INTO work VALUES (?, ?, ?)", key, FAILED if failed else RECORDED, line)
        return earlier is None

    def add_name(self, name: str, key: str) -> None:
        """Store an additional key of a task, whose path may have been typed in another way."""
        if name != key:
            self._execute("INSERT OR IGNORE INTO names VALUES (?, ?)", name, key)

    def recorded_as(self, name: str) -> str | None:
        """Return the key under which a task with this (additional) key is begun or recorded; None if it is new."""
        query = "SELECT key FROM work WHERE key = ?1 UNION ALL SELECT key FROM names WHERE name = ?1 LIMIT 1"
        rows = self._execute(query, name)
        return rows[0][0] if rows else None

    def renumber(self, keys: Iterable[str]) -> int:
        """Set the lines of recorded tasks to their order in `keys`, and return the number of keys."""
        number = 0
        for number, key in enumerate(keys, 1):
            self._execute("UPDATE work SET line = ? WHERE key = ?", number - 1, key)
        return number

    def line(self, key: str) -> int | None:
        """Return the last line of the output with a record of the task, counted from 0; None if there is none."""
        rows = self._execute("SELECT line FROM work WHERE key = ?", key)
        return rows[0][0] if rows else None

    def count_failed(self) -> int:
        """Return the number of recorded tasks that failed."""
        return self._execute("SELECT count(*) FROM work WHERE state = ?", FAILED)[0][0]

    def has_failed(self, key: str) -> bool:
        """Return whether the task is recorded as failed."""
        return bool(self._execute("SELECT 1 FROM work WHERE key = ? AND state = ?", key, FAILED))

    def dump(self, retry: bool) -> bytes:
        """Serialize the recorded tasks, or with `retry` only failed ones, for `load` in another process.

        Each entry has a key or additional key (16 bytes), the task's key (16 bytes) and its state (1 byte).
        """
        states = "SELECT key AS name, key, state FROM work WHERE state >= ?1"
        names = "SELECT name, key, state FROM names JOIN work USING (key) WHERE state >= ?1"
        rows = self._execute(f"{states} UNION ALL {names}", FAILED if retry else RECORDED)
        return b"".join(bytes.fromhex(name + key) + bytes([state]) for name, key, state in rows)

    def load(self, tasks: bytes) -> None:
        """Add the tasks that `dump` returned."""
        for i in range(0, len(tasks), 2 * KEY_BYTES + 1):
            name, key = (tasks[j : j + KEY_BYTES].hex() for j in (i, i + KEY_BYTES))
            self._execute("INSERT OR IGNORE INTO work VALUES (?, ?, NULL)", key, tasks[i + 2 * KEY_BYTES])
            self.add_name(name, key)

    def keep_caption(self, content: str, record: dict) -> None:
        """Store the record to copy for images with the same content, unless one is stored already."""
        self._execute("INSERT OR IGNORE INTO captions VALUES (?, ?)", content, json.dumps(record))

    def caption(self, content: str) -> dict | None:
        """Return the stored record for images with this content, or None."""
        rows = self._execute("SELECT record FROM captions WHERE content = ?", content)
        return json.loads(rows[0][0]) if rows else None

    def defer(self, record: dict) -> None:
        """Store a record whose caption file has an uncertain path until its image is found."""
        self._execute("INSERT OR REPLACE INTO unplaced VALUES (?, ?)", record["key"], json.dumps(record))

    def take_deferred(self, key: str) -> dict | None:
        """Remove and return the deferred record of a task, or None."""
        rows = self._execute("DELETE FROM unplaced WHERE key = ? RETURNING record", key)
        return json.loads(rows[0][0]) if rows else None

    def deferred(self) -> Iterator[dict]:
        """Yield the records that are still deferred."""
        for (record,) in self._execute("SELECT record FROM unplaced"):
            yield json.loads(record)

    def _execute(self, query: str, *values: str | int) -> list[tuple]:
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
