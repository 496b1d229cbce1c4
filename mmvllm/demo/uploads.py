"""Tracks which sessions hold uploaded files, and removes files that none holds."""

import asyncio
import atexit
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mmvllm.demo.parts import FileParts

ORPHAN_SECONDS = 600.0  # an upload that no session has claimed is removed after this time
SCAN_PAUSE = 0.1  # seconds between scans of the folder, which block the interpreter
MAX_BYTES, MAX_FILES = 8 * 2**30, 20_000  # of all sessions together
MAX_HELD = 500  # files of one session, in its conversation and in drafts since its last answer
MAX_INCOMING_FILES = 500  # files that have begun to arrive; each is open until its whole upload is there
PATIENCE_SECONDS = 5.0  # after which an upload may be ended to make room for others
# An upload reserves as many further bytes as have arrived, within this minimum and maximum.
FIRST_BYTES, AHEAD_BYTES = 2**20, 32 * 2**20
MAX_PATH_LENGTH = 4096
PREFIX = "mmvllm-page-"  # of the folder of each process
STARTING_SECONDS = 60.0  # a younger folder may not be locked yet


@dataclass(slots=True, eq=False)
class Incoming:
    """An upload that is arriving: its announced size, its files, and the bytes that are reserved for it."""

    num_bytes: int
    parts: FileParts
    num_reserved: int
    num_received: int = 0
    begin: float = field(default_factory=lambda: time.monotonic())  # looked up late, since tests replace it
    timeout: asyncio.Timeout | None = None  # while it arrives
    gives_way: bool = False  # it was ended to make room for others

    @property
    def rate(self) -> float:
        """Received bytes per second."""
        return self.num_received / (time.monotonic() - self.begin)

    def end(self) -> None:
        """End the upload early."""
        self.gives_way = True
        if self.timeout is not None:
            self.timeout.reschedule(0)

    def reserve(self, num_received: int) -> bool:
        """Reserve further bytes if the received bytes exceed the reservation; return whether they did.

        Reserving the announced size or `AHEAD_BYTES` at once would let slow uploads fill the folder.
        """
        self.num_received = num_received
        if num_received <= self.num_reserved:
            return False
        self.num_reserved = min(self.num_bytes, num_received + min(max(num_received, FIRST_BYTES), AHEAD_BYTES))
        return True


class Uploads:
    """All uploaded files, at `folder/HASH/NAME`, and the sessions that hold them.

    Gradio names files by their content, so several sessions may hold the same file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._held: dict[str, set[Path]] = {}
        self._own: set[Path] = set()
        self._incoming: list[Incoming] = []
        self._scanning = ThreadPoolExecutor(1, "mmvllm-uploads")  # separate: other work must not wait for scans
        self._last_scan: asyncio.Task | None = None  # the scan that began last
        self._next_scan: asyncio.Task | None = None

    def keep(self, path: Path) -> None:
        """Keep a file of the page itself, which no session can release."""
        self._own.add(path)

    def locate(self, path: str) -> Path:
        """Return the path of a file in this folder, which may no longer exist; raises ValueError for any other path.

        Visitors name files by their paths on the server. No file is opened, since opening a FIFO or a device may block.
        Long paths are refused, since `realpath` takes seconds for half a million folders.
        """
        if len(path) <= MAX_PATH_LENGTH and (file := Path(path)).parent.parent == self.folder:
            with suppress(ValueError):  # a null character or a lone surrogate
                if Path(os.path.realpath(file)) == file:
                    return file
        raise ValueError("only files that were uploaded here can be asked about; add the file again")

    def find(self, path: str) -> Path:
        """Return the path of an existing file in this folder; raises ValueError for any other path."""
        file = self.locate(path)
        if not os.path.isfile(file):
            raise ValueError(f"{file.name} is no longer here; add it again")
        return file

    def claim(self, session_id: str, path: str) -> Path:
        """Register a session as a holder of an uploaded file; raises ValueError for any other file."""
        file = self.find(path)
        held = self._held.setdefault(session_id, set())
        if file not in held and len(held) >= MAX_HELD:
            raise ValueError("There are too many files; start a new conversation")
        held.add(file)
        return file

    def release(self, session_id: str, keep: Collection[Path] = ()) -> None:
        """Release a session's files except those in `keep`, and remove files that no session holds."""
        held = self._held.pop(session_id, set())
        if kept := held.intersection(keep):
            self._held[session_id] = kept
        for path in held:
            if not self._is_in_use(path):
                _remove(path)

    async def remove_orphans(self) -> None:
        """Remove old uploads that no session has claimed, and empty folders, without blocking the event loop."""
        for path in await asyncio.to_thread(self._old):
            if not self._is_in_use(path):  # checked last: it may have been claimed in the meantime
                _remove(path)
            await asyncio.sleep(0)
        await asyncio.to_thread(self._remove_empty_folders)

    @contextmanager
    def incoming(self, num_bytes: int, parts: FileParts) -> Iterator[Incoming]:
        """Count an upload as incoming and reserve space for its first bytes; its files count once they begin."""
        upload = Incoming(num_bytes, parts, num_reserved=min(num_bytes, FIRST_BYTES))
        self._incoming.append(upload)
        try:
            yield upload
        finally:
            self._incoming.remove(upload)

    async def has_room(self) -> bool:
        """Return whether all incoming uploads fit beside the existing files.

        An upload that completes during the scan of the folder may be counted twice, but is never missed.
        """
        if not self.make_room():
            return False
        num_bytes, num_files = sum(upload.num_reserved for upload in self._incoming), self._num_open()
        sizes = await self._sizes()
        return len(sizes) + num_files <= MAX_FILES and sum(sizes) + num_bytes <= MAX_BYTES

    async def _sizes(self) -> list[int]:
        """Return the sizes of all files from a scan that begins after the call; waiting uploads share one scan."""
        if self._next_scan is None or self._next_scan.done():
            self._next_scan = asyncio.create_task(self._scan(self._last_scan))
        return await asyncio.shield(self._next_scan)

    async def _scan(self, last: asyncio.Task | None) -> list[int]:
        if last is not None and not last.done():
            await asyncio.wait([last])
            await asyncio.sleep(SCAN_PAUSE)
        self._last_scan, self._next_scan = self._next_scan, None
        scan = asyncio.get_running_loop().run_in_executor
        return await scan(self._scanning, lambda: [stat.st_size for _, stat in self._files()])

    def make_room(self) -> bool:
        """End the slowest uploads while too many files are open; return whether there is room.

        The last upload is never ended, since a single upload may have as many files as a question.
        """
        while self._num_open() > MAX_INCOMING_FILES and len(self._arriving()) > 1:
            old = [one for one in self._arriving() if one.begin + PATIENCE_SECONDS < time.monotonic()]
            if not old:
                return False
            slowest = min(old, key=lambda one: one.rate)
            slowest.end()
        return True

    def _arriving(self) -> list[Incoming]:
        return [upload for upload in self._incoming if not upload.gives_way]

    def _num_open(self) -> int:
        return sum(upload.parts.num_files for upload in self._arriving())

    def _old(self) -> list[Path]:
        return [path for path, stat in self._files() if _is_old(stat)]

    def _remove_empty_folders(self) -> None:
        """Remove old empty folders, which gradio creates for files with an invalid name."""
        with suppress(OSError):  # too many files are open
            for folder in self.folder.iterdir():
                with suppress(OSError):  # it has files
                    if _is_old(folder.stat()):
                        folder.rmdir()

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder, _, names in os.walk(self.folder):
            for path in (Path(folder, name) for name in names):
                with suppress(FileNotFoundError):  # it was removed during the scan
                    yield path, path.lstat()

    def _is_in_use(self, path: Path) -> bool:
        return path in self._own or any(path in held for held in self._held.values())


@cache
def process_uploads() -> Uploads:
    """Return the uploads of all pages of this process; their folder is removed when the process exits.

    If the process is killed, a later process removes the folder.
    """
    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    with suppress(OSError):  # a file system without locks
        _locked(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = str(folder)  # gradio has no other setting for it
    return Uploads(folder)


def _remove_left() -> None:
    """Remove folders whose processes have ended, which the system has unlocked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, or is removed by another process right now
            if time.time() - folder.stat().st_mtime > STARTING_SECONDS and (lock := _locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder until this process ends, and return its descriptor; None if another holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except BlockingIOError:
        os.close(descriptor)
        return None


def _is_old(stat: os.stat_result) -> bool:
    return stat.st_mtime < time.time() - ORPHAN_SECONDS


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    with suppress(OSError):  # it has other files, or was removed
        path.parent.rmdir()
