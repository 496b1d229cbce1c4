"""The state of every task by key, and captions by image content, on disk so that memory stays small.

This is a private temporary SQLite database, deleted with the process; the journal is the permanent copy.
"""

import json
import sqlite3
import threading

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.settings import CaptionSettings

BEGUN, RECORDED, FAILED = range(3)
KEY_BYTES = 16


class Index:
    """Shared by two threads: the one that finds images claims tasks, and the engine's thread notes their results."""

    def __init__(self):
        self._lock = threading.Lock()
        # Without a name, SQLite creates a temporary file as soon as its cache is full.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._execute("PRAGMA synchronous = OFF")
        self._execute("PRAGMA journal_mode = OFF")
        self._execute("CREATE TABLE work (key TEXT PRIMARY KEY, state INTEGER, line INTEGER) WITHOUT ROWID")
        self._execute("CREATE TABLE captions (content TEXT PRIMARY KEY, record TEXT) WITHOUT ROWID")

    def claim(self, key: str, retry: bool = False) -> bool:
        """Mark a task as begun; False if it was begun or recorded before, or with `retry` if it has not failed."""
        if retry:
            changed = self._execute(
                "UPDATE work SET state = ? WHERE key = ? AND state = ? RETURNING 1", BEGUN, key, FAILED
            )
        else:
            changed = self._execute("INSERT OR IGNORE INTO work VALUES (?, ?, NULL) RETURNING 1", key, BEGUN)
        return bool(changed)

    def note(self, key: str, failed: bool, line: int) -> bool:
        """Store a task's result and its line in the output; False if an earlier line has a record of the task."""
        earlier = self.line(key)
        self._execute("INSERT OR REPLACE INTO work VALUES (?, ?, ?)", key, FAILED if failed else RECORDED, line)
        return earlier is None

    def line(self, key: str) -> int | None:
        """The last line of the output with a record of the task, from 0."""
        rows = self._execute("SELECT line FROM work WHERE key = ?", key)
        return rows[0][0] if rows else None

    def count_failed(self) -> int:
        """Number of recorded tasks that failed."""
        return self._execute("SELECT count(*) FROM work WHERE state = ?", FAILED)[0][0]

    def has_failed(self, key: str) -> bool:
        """Whether the task is recorded as failed."""
        return bool(self._execute("SELECT 1 FROM work WHERE key = ? AND state = ?", key, FAILED))

    def dump(self, retry: bool) -> bytes:
        """The recorded tasks, or with `retry` the failed ones, for `load` in another process; 17 bytes each."""
        rows = self._execute("SELECT key, state FROM work WHERE state >= ?", FAILED if retry else RECORDED)
        return b"".join(bytes.fromhex(key) + bytes([state]) for key, state in rows)

    def load(self, tasks: bytes) -> None:
        """Add the tasks that `dump` returned."""
        for i in range(0, len(tasks), KEY_BYTES + 1):
            key, state = tasks[i : i + KEY_BYTES].hex(), tasks[i + KEY_BYTES]
            self._execute("INSERT INTO work VALUES (?, ?, NULL)", key, state)

    def keep_caption(self, content: str, record: dict) -> None:
        """Store the record that images of the same content copy; the first record is kept."""
        self._execute("INSERT OR IGNORE INTO captions VALUES (?, ?)", content, json.dumps(record))

    def caption(self, content: str) -> dict | None:
        """The stored record for images of this content, if there is one."""
        rows = self._execute("SELECT record FROM captions WHERE content = ?", content)
        return json.loads(rows[0][0]) if rows else None

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
    """Store a record for images of the same content, if it is not a copy itself and the model would repeat it."""
    is_original = record["error"] is None and record["duplicate_of"] is None
    if is_original and settings.is_repeatable and record["settings"] == settings.fingerprint:
        index.keep_caption(settings.content_key(record["digest"], record["prompt"]), record)
