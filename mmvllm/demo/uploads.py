"""Pictures that visitors uploaded: whose they are, and when they go."""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
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
        for path in held - self._in_use():
            _remove(path)

    def remove_orphans(self) -> None:
        """Remove old uploads that no session has claimed."""
        in_use, oldest = self._in_use(), time.time() - ORPHAN_SECONDS
        for path in [*self.folder.rglob("*")]:
            if path not in in_use and path.is_file() and path.stat().st_mtime < oldest:
                _remove(path)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much more may be uploaded."""
        self.remove_orphans()
        sizes = [path.stat().st_size for path in self.folder.rglob("*") if path.is_file()]
        return len(sizes) < MAX_FILES and sum(sizes) + self._num_coming + num_bytes <= MAX_BYTES

    @contextmanager
    def coming(self, num_bytes: int) -> Iterator[None]:
        """Keep room for an upload while it comes."""
        self._num_coming += num_bytes
        try:
            yield
        finally:
            self._num_coming -= num_bytes

    def _in_use(self) -> set[Path]:
        return self._own.union(*self._held.values())


@cache
def process_uploads() -> Uploads:
    """The uploads of this process, all its pages taken together; their folder goes when the process does."""
    folder = Path(tempfile.mkdtemp(prefix="mmvllm-demo-")).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["GRADIO_TEMP_DIR"] = str(folder)  # gradio has no other way to be told
    return Uploads(folder)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    if not any(path.parent.iterdir()):
        path.parent.rmdir()
