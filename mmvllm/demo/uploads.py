"""Pictures that visitors uploaded: whose they are, and when they go."""

import asyncio
import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

ORPHAN_SECONDS = 600.0  # an upload that no session has claimed by then is removed
MAX_BYTES, MAX_FILES = 8 * 2**30, 20_000  # of all visitors together


class Uploads:
    """Which session holds which file. Gradio names a file by its content, so that several may hold the same one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._held: dict[str, set[Path]] = {}
        self._own: set[Path] = set()
        self._num_coming = 0

    def keep(self, path: Path) -> None:
        """Keep a file of the page's own, which no visitor can let go of."""
        self._own.add(path)

    def claim(self, session_id: str, path: str) -> Path:
        """Make a session a holder of an uploaded file; raises ValueError for any other file."""
        place = Path(path)
        if not place.is_relative_to(self.folder) or place.resolve() != place:
            raise ValueError("only pictures that were uploaded here can be asked about")
        if not os.path.isfile(place):
            raise ValueError(f"{place.name} is no longer here; add it again")
        self._held.setdefault(session_id, set()).add(place)
        return place

    def release(self, session_id: str, keep: Collection[Path] = ()) -> None:
        """Let go of a session's files but those to `keep`, and remove what nobody holds."""
        held = self._held.pop(session_id, set())
        if kept := held.intersection(keep):
            self._held[session_id] = kept
        for path in held:
            if not self._is_in_use(path):
                _remove(path)

    async def remove_orphans(self) -> None:
        """Remove old uploads that no session has claimed; the event loop does other things meanwhile."""
        for path in await asyncio.to_thread(self._old):
            if not self._is_in_use(path):  # asked only now: it may have been claimed since
                _remove(path)
            await asyncio.sleep(0)

    @contextmanager
    def coming(self, num_bytes: int) -> Iterator[int]:
        """Keep room for an upload while it comes; gives the bytes of all that are coming, this one included."""
        self._num_coming += num_bytes
        try:
            yield self._num_coming
        finally:
            self._num_coming -= num_bytes

    def has_room(self, num_coming: int) -> bool:
        """Whether so many bytes fit beside the files that are here. It reads the whole folder: call it in a thread.

        An upload that arrives meanwhile counts as coming and as a file, rather than as neither.
        """
        sizes = [stat.st_size for _, stat in self._files()]
        return len(sizes) < MAX_FILES and sum(sizes) + num_coming <= MAX_BYTES

    def _old(self) -> list[Path]:
        oldest = time.time() - ORPHAN_SECONDS
        return [path for path, stat in self._files() if stat.st_mtime < oldest]

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder, _, names in os.walk(self.folder):
            for path in (Path(folder, name) for name in names):
                with suppress(FileNotFoundError):  # it has just been removed
                    yield path, path.lstat()

    def _is_in_use(self, path: Path) -> bool:
        return path in self._own or any(path in held for held in self._held.values())


@cache
def process_uploads() -> Uploads:
    """The uploads of this process, all its pages taken together; their folder goes when the process does."""
    folder = Path(tempfile.mkdtemp(prefix="mmvllm-demo-")).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = str(folder)  # gradio has no other way to be told
    return Uploads(folder)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    with suppress(OSError):  # other files are there, or the folder has gone
        path.parent.rmdir()
