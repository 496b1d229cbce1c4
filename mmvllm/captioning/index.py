"""What a job has done and begun, by key, and its captions by content: on disk, so that memory stays small.

A private temporary SQLite database that vanishes with the process; the journal is what lasts.
"""

import json
import sqlite3
import threading

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.settings import CaptionSettings

BEGUN, RECORDED, FAILED = range(3)
KEY_BYTES = 16


class Index:
    """Used by two threads: the one that finds pictures claims them, the engine's notes what became of them."""

    def __init__(self):
        self._lock = threading.Lock()
        # Without a name, SQLite makes a temporary file of its own once its cache is full.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._execute("PRAGMA synchronous = OFF")
        self._execute("PRAGMA journal_mode = OFF")
        self._execute("CREATE TABLE work (key TEXT PRIMARY KEY, state INTEGER, line INTEGER) WITHOUT ROWID")
        self._execute("CREATE TABLE captions (content TEXT PRIMARY KEY, record TEXT) WITHOUT ROWID")

    def claim(self, key: str, retry: bool = False) -> bool:
        """Whether a piece of work is to be done, and is begun hereby: a new one, or with `retry` one that failed."""
        if retry:
            changed = self._execute(
                "UPDATE work SET state = ? WHERE key = ? AND state = ? RETURNING 1", BEGUN, key, FAILED
            )
        else:
            changed = self._execute("INSERT OR IGNORE INTO work VALUES (?, ?, NULL) RETURNING 1", key, BEGUN)
        return bool(changed)

    def note(self, key: str, failed: bool, line: int) -> bool:
        """Which line of the output speaks of it now, and whether it failed; False if an earlier line did before."""
        earlier = self.line(key)
        self._execute("INSERT OR REPLACE INTO work VALUES (?, ?, ?)", key, FAILED if failed else RECORDED, line)
        return earlier is None

    def line(self, key: str) -> int | None:
        """The last line of the output that speaks of it."""
        rows = self._execute("SELECT line FROM work WHERE key = ?", key)
        return rows[0][0] if rows else None

    def count_failed(self) -> int:
        """How much of what is recorded failed."""
        return self._execute("SELECT count(*) FROM work WHERE state = ?", FAILED)[0][0]

    def dump(self, retry: bool) -> bytes:
        """The keys that a claim is refused, or with `retry` those that it is given; for `load` in another process."""
        rows = self._execute("SELECT key FROM work WHERE state >= ?", FAILED if retry else RECORDED)
        return b"".join(bytes.fromhex(key) for (key,) in rows)

    def load(self, keys: bytes) -> None:
        """Take over what `dump` gave."""
        for i in range(0, len(keys), KEY_BYTES):
            self._execute("INSERT INTO work VALUES (?, ?, NULL)", keys[i : i + KEY_BYTES].hex(), FAILED)

    def keep_caption(self, content: str, record: dict) -> None:
        """The record that other pictures of the same content copy; the first one stays."""
        self._execute("INSERT OR IGNORE INTO captions VALUES (?, ?)", content, json.dumps(record))

    def caption(self, content: str) -> dict | None:
        """The record that pictures of this content copy."""
        rows = self._execute("SELECT record FROM captions WHERE content = ?", content)
        return json.loads(rows[0][0]) if rows else None

    def _execute(self, query: str, *values: str | int) -> list[tuple]:
        try:
            with self._lock:
                return self._database.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:
            raise JobError(
                f"the index of what is done cannot be kept in the folder for temporary files ({error}); make room "
                "there, or set SQLITE_TMPDIR to another folder"
            ) from error


def keep_caption(settings: CaptionSettings, index: Index, record: dict) -> None:
    """Let pictures of the same content copy this record, if it is a caption of its own and would come out again."""
    is_original = record["error"] is None and record["duplicate_of"] is None
    if is_original and settings.is_repeatable and record["settings"] == settings.fingerprint:
        index.keep_caption(settings.content_key(record["digest"], record["prompt"]), record)
