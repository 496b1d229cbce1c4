"""What a job has done and begun, by key, and its captions by content: on disk, so that memory stays small.

A private temporary SQLite database that vanishes with the process; the journal is what lasts.
"""

import json
import sqlite3
import threading

BEGUN, RECORDED, FAILED = range(3)
KEY_BYTES = 16


class Index:
    """Used by two threads: the one that finds pictures claims them, the engine's notes what became of them."""

    def __init__(self):
        self._lock = threading.Lock()
        # Without a name, SQLite makes a temporary file of its own once its cache is full.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE work (key TEXT PRIMARY KEY, state INTEGER, line INTEGER) WITHOUT ROWID")
        self._database.execute("CREATE TABLE captions (content TEXT PRIMARY KEY, record TEXT) WITHOUT ROWID")

    def claim(self, key: str, retry: bool = False) -> bool:
        """Whether a piece of work is to be done, and is begun hereby: a new one, or with `retry` one that failed."""
        with self._lock:
            if retry:
                query = "UPDATE work SET state = ? WHERE key = ? AND state = ?"
                return self._database.execute(query, (BEGUN, key, FAILED)).rowcount == 1
            query = "INSERT OR IGNORE INTO work VALUES (?, ?, NULL)"
            return self._database.execute(query, (key, BEGUN)).rowcount == 1

    def note(self, key: str, failed: bool, line: int) -> bool:
        """Which line of the output speaks of it now, and whether it failed; False if an earlier line did before."""
        earlier = self.line(key)
        with self._lock:
            state = FAILED if failed else RECORDED
            self._database.execute("INSERT OR REPLACE INTO work VALUES (?, ?, ?)", (key, state, line))
        return earlier is None

    def line(self, key: str) -> int | None:
        """The last line of the output that speaks of it."""
        row = self._one("SELECT line FROM work WHERE key = ?", key)
        return None if row is None else row[0]

    def dump(self, retry: bool) -> bytes:
        """The keys that a claim is refused, or with `retry` those that it is given; for `load` in another process."""
        keys = bytearray()
        with self._lock:
            query = "SELECT key FROM work WHERE state >= ?"
            for (key,) in self._database.execute(query, (FAILED if retry else RECORDED,)):
                keys += bytes.fromhex(key)
        return bytes(keys)

    def load(self, keys: bytes) -> None:
        """Take over what `dump` gave."""
        rows = ((keys[i : i + KEY_BYTES].hex(), FAILED) for i in range(0, len(keys), KEY_BYTES))
        with self._lock:
            self._database.execute("BEGIN")
            self._database.executemany("INSERT INTO work VALUES (?, ?, NULL)", rows)
            self._database.execute("COMMIT")

    def keep_caption(self, content: str, record: dict) -> None:
        """The record that other pictures of the same content copy; the first one stays."""
        with self._lock:
            self._database.execute("INSERT OR IGNORE INTO captions VALUES (?, ?)", (content, json.dumps(record)))

    def caption(self, content: str) -> dict | None:
        row = self._one("SELECT record FROM captions WHERE content = ?", content)
        return None if row is None else json.loads(row[0])

    def _one(self, query: str, key: str) -> tuple | None:
        with self._lock:
            return self._database.execute(query, (key,)).fetchone()
