"""Finds images and videos in folders and by glob patterns: depth first, without holding a folder in memory."""

import os
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice, takewhile
from operator import attrgetter
from pathlib import Path, PurePath

from mmvllm.captioning.sources.counts import Counts
from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.names import (
    folder_name,
    is_hidden_name,
    is_media_name,
    is_video_name,
    kind_of_file,
    relative_path,
)
from mmvllm.captioning.sources.tars import is_hidden, tar_members

CHUNK = 4096  # folder entries that are sorted together
HIDDEN = "hidden"
MAGIC = re.compile(r"[*?[]")
_NO_PATH = re.compile(r"(https?|file|data):|~", re.IGNORECASE)  # what `load_image` does not treat as a path

# The alternatives for the rest of a path below a folder, each a tuple of patterns for names; () matches everything.
Pattern = frozenset[tuple[str, ...]]
EVERYTHING: Pattern = frozenset({()})


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder that is being read."""

    path: str
    relative: str
    pattern: Pattern
    identity: tuple[int, int] | None
    entries: Generator[os.DirEntry, None, None]


def _entries(path: str) -> Generator[os.DirEntry, None, None]:
    with os.scandir(path or ".") as entries:
        while chunk := sorted(islice(entries, CHUNK), key=attrgetter("name")):
            if len(chunk) < CHUNK:
                entries.close()  # closed before the entries are used, which may take hours
            yield from chunk


class Walk:
    """A walk through a folder, depth first. Links to a folder above or to one in `followed` are not followed.

    Ignored files are counted in `ignored`; with a pattern, only if they match it.
    """

    def __init__(self, root: str, relative: str, pattern: Pattern, followed: set[tuple], ignored: Counts):
        self.has_match = False  # true also for a folder that cannot be read
        self._above = {_identity(parent) for parent in Path(os.path.realpath(root)).parents}
        self._followed, self._ignored = followed, ignored
        self._stack = [_Folder(root, relative, pattern, _identity(root), _entries(root))]

    def items(self) -> Iterator[Item]:
        try:
            while self._stack:
                folder = self._stack[-1]
                try:
                    entry = next(folder.entries, None)
                except OSError as error:
                    self.has_match, entry = True, None
                    yield _unreadable(folder, error)
                if entry is None:
                    self._stack.pop()
                else:
                    yield from self._visit(folder, entry)
        finally:
            for folder in self._stack:
                folder.entries.close()

    def _visit(self, folder: _Folder, entry: os.DirEntry) -> Iterator[Item]:
        pattern = _advance(folder.pattern, entry.name)
        self.has_match |= () in pattern
        path = os.path.join(folder.path, entry.name)
        relative = f"{folder.relative}/{entry.name}" if folder.relative else entry.name
        if not pattern and () in folder.pattern:
            self._ignored.add(HIDDEN)
        elif _is_folder(entry):
            if pattern and self._may_enter(entry, pattern):
                self._stack.append(_Folder(path, relative, pattern, _identity(path), _entries(path)))
        elif () in pattern:
            yield from _file(path, relative, self._ignored)

    def _may_enter(self, entry: os.DirEntry, pattern: Pattern) -> bool:
        if not _is_link(entry):
            return True
        identity = _identity(entry.path)
        is_above = identity in self._above or any(folder.identity == identity for folder in self._stack)
        if is_above or (identity, pattern) in self._followed:
            return False
        self._followed.add((identity, pattern))
        return True


def _unreadable(folder: _Folder, error: OSError) -> Item:
    relative = folder.relative or relative_path(folder_name(folder.path))
    return Item(folder.path, relative, None, error=f"folder cannot be read ({error.strerror})")


def _file(path: str, relative: str, ignored: Counts) -> Iterator[Item]:
    if is_media_name(path):
        source = os.path.join(".", path) if _NO_PATH.match(path) else path
        yield Item(path, relative, source, is_video=is_video_name(path))
    elif path.lower().endswith(".tar"):
        yield from in_tar(path, relative, ignored)
    else:
        ignored.add(kind_of_file(path))


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # for example a link to itself
        return False


def _is_link(entry: os.DirEntry) -> bool:
    return entry.is_symlink() or (hasattr(entry, "is_junction") and entry.is_junction())  # since Python 3.12


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path or ".")
    except OSError:  # deleted; reading it reports the error
        return None
    return status.st_dev, status.st_ino


def match_pattern(path: str, followed: set[tuple], ignored: Counts) -> Iterator[Item]:
    # Not glob.iglob: it reads whole folders into memory, recurses, and never ends on links that form a cycle.
    parts = PurePath(path).parts
    if path.endswith(("/", os.sep, "**")):  # the path before it must be a folder
        parts += ("*",)
    fixed = list(takewhile(lambda part: not MAGIC.search(part), parts))
    root = os.path.join("", *fixed)
    if os.path.isdir(root or "."):
        walk = Walk(root, "", _with_skipped({parts[len(fixed) :]}), followed, ignored)
        yield from walk.items()
        if walk.has_match:
            return
    yield Item(path, relative_path(path), None, error="nothing matches this pattern")


def _advance(pattern: Pattern, name: str) -> Pattern:
    """Return the pattern for entries below `name`.

    Only a pattern that begins with a dot matches a name with a dot, and only its own name a folder of a system.
    """
    is_hidden = is_hidden_name(name)
    after = set()
    for rest in pattern:
        if not rest or rest[0] == "**":
            after |= set() if is_hidden else {rest}
        elif fnmatch(name, rest[0]) and (not is_hidden or rest[0].startswith(".") or rest[0] == name):
            after.add(rest[1:])
    return _with_skipped(after)


def _with_skipped(pattern: set[tuple[str, ...]]) -> Pattern:
    """Add the alternatives in which `**` matches no folder."""
    after = set(pattern)
    for rest in pattern:
        while rest and rest[0] == "**":
            rest = rest[1:]
            after.add(rest)
    return frozenset(after)


def in_tar(tar: str, relative: str, ignored: Counts) -> Iterator[Item]:
    def count(name: str) -> None:
        ignored.add(HIDDEN if is_hidden(name) else kind_of_file(name))

    try:
        with closing(tar_members(tar, count)) as members:
            for name, member in members:
                error = (
                    None if member else "is a link, which cannot be followed within a tar; create the tar without links"
                )
                below = relative_path(relative[: -len(".tar")], name)
                yield Item(f"{tar}/{name}", below, member, error=error, is_video=is_video_name(name))
    except ValueError as error:
        yield Item(tar, relative, None, error=str(error).removeprefix(f"{tar}: "))
