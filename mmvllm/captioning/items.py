"""The pictures that paths, patterns, tar shards and lists name, found one by one as they are asked for.

No picture is read here, and no folder or list is held whole, so that a run over millions starts at once.
"""

import errno
import json
import os
import re
import stat
import sys
import tarfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice, takewhile
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Any, BinaryIO

# What Pillow reads by itself and people keep pictures in; AVIF since Pillow 11.3.
_FORMATS = "apng avif bmp dib gif j2k jfif jp2 jpe jpeg jpg mpo pbm pgm png pnm ppm qoi tga tif tiff webp"
SUFFIXES = frozenset(f".{name}" for name in _FORMATS.split())
MAX_FILE_BYTES = 1024 * 1024 * 1024
CHUNK = 4096  # folder entries that are sorted together

_LISTS = (".jsonl", ".lst", ".txt")
_PACKED = re.compile(r"\.(tar\.(gz|bz2|xz|zst|lz4|lzma|z)|tgz|tbz2?|txz|tzst)\Z", re.IGNORECASE)
_PACKED_STARTS = (b"\x1f\x8b", b"\xfd7zXZ", b"(\xb5/\xfd", b"\x04\x22\x4d\x18")
_MAGIC = re.compile(r"[*?[]")
_URL = re.compile(r"https?://(?:[^/?#]*@)?(\[[^]/?#]*\]|[^/?#:]*)[^/?#]*([^?#]*)", re.IGNORECASE)  # host, path
_NO_PATH = re.compile(r"(https?|file|data):|~", re.IGNORECASE)  # what `load_image` takes for something else

# What may follow below a folder, as alternatives: the names of a path, each a pattern. After () everything may.
Pattern = frozenset[tuple[str, ...]]
_EVERYTHING: Pattern = frozenset({()})


@dataclass(frozen=True, slots=True)
class TarMember:
    """Where a picture lies in an uncompressed tar: `size` bytes from byte `offset`."""

    tar: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Read the picture, in any thread. Raises ValueError if it is not there any more or too large."""
        if self.size > MAX_FILE_BYTES:
            raise ValueError(
                f"{self.tar}: the picture in it has {self.size} bytes, more than {MAX_FILE_BYTES}; shrink it first"
            )
        try:
            with _open_regular(self.tar) as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise ValueError(f"{self.tar}: cannot be read ({error.strerror})") from None
        if len(data) < self.size:
            raise ValueError(f"{self.tar}: ends {self.size - len(data)} bytes before the picture in it does")
        return data


@dataclass(frozen=True, slots=True)
class Item:
    """A picture to caption.

    Args:
        path: what its record calls it: a file's path, URL, "shard.tar/member.jpg", or "list.jsonl:12" (line 12).
        relative: its place below an output folder, '/' separated; never empty, absolute or with '..'.
        source: what to load: path, URL, data URI or tar member; None where there is an `error`.
        id, prompt, context: its own, from a JSONL list.
        error: why there is nothing to load.
    """

    path: str
    relative: str
    source: str | TarMember | None
    id: str | None = None
    prompt: str | None = None
    context: str | None = None
    error: str | None = None

    def read(self) -> Any:
        """What `load_image` takes. Raises ValueError with `error`, or if a tar member cannot be read."""
        if self.error is not None:
            raise ValueError(self.error)
        return self.source.read() if isinstance(self.source, TarMember) else self.source


def find_items(paths: Sequence[str | os.PathLike]) -> Iterator[Item]:
    """Find the pictures in folders, glob patterns, tar shards, lists ("-" is standard input), and URLs and files.

    Folders come depth first and sorted, in chunks of `CHUNK` entries. What cannot be looked into is an item with an
    error. Raises ValueError, at once, for a list that cannot be read.
    """
    given = [os.fsdecode(path) for path in paths]
    for path in given:
        is_pipe = os.path.exists(path) and not os.path.isfile(path)  # what writes to it would see it closed
        if path != "-" and _kind(path) == "list" and not is_pipe:
            _open_list(path).close()
    return _find(given)


def tar_members(path: str | os.PathLike) -> Iterator[tuple[str, TarMember]]:
    """Find the pictures in an uncompressed tar by name, one by one.

    Raises ValueError if it cannot be opened or is compressed, or is damaged: then after the members before the damage.
    """
    tar = os.fsdecode(path)
    try:
        with _open_regular(tar) as file:
            if _PACKED.search(tar) or file.read(6).startswith(_PACKED_STARTS):
                raise ValueError(f"{tar}: is compressed, pictures cannot be reached by seeking; decompress it first")
            for header in _headers(file, tar):
                if _is_plain(header) and not _is_hidden(header.name) and _has_suffix(header.name):
                    yield header.name, TarMember(tar, header.offset_data, header.size)
    except OSError as error:
        raise ValueError(f"{tar}: cannot be read ({error.strerror})") from None


def _kind(path: str) -> str:
    if path == "-":
        return "list"
    if _URL.match(path):
        return "url"
    if os.path.isdir(path):
        return "folder"
    if _MAGIC.search(path) and not os.path.lexists(path):
        return "pattern"
    if path.lower().endswith(".tar") or _PACKED.search(path):
        return "tar"
    return "list" if path.lower().endswith(_LISTS) else "file"


def _find(paths: list[str]) -> Iterator[Item]:
    followed: set[tuple] = set()
    for path in paths:
        kind = _kind(path)
        if kind == "folder":
            name = _folder_name(path) if len(paths) > 1 else ""
            yield from _Walk(path, name, _EVERYTHING, followed).items()
        elif kind == "pattern":
            yield from _match(path, followed)
        elif kind == "tar":
            yield from _in_tar(path, _relative(PurePath(path).name))
        elif kind == "list":
            yield from _in_list(path)
        else:
            yield Item(path, _url_relative(path) if kind == "url" else _relative(PurePath(path).name), path)


# Where captions go


def _relative(*paths: str) -> str:
    """The paths joined, without whatever could lead out of a folder."""
    pures = [PurePath(path.replace("\0", "")) for path in paths]
    names = [name for pure in pures for name in pure.parts[bool(pure.anchor) :] if name != ".."]
    return "/".join(names) or "index"


def _url_relative(url: str) -> str:
    host, path = _URL.match(url).groups()
    return _relative(host, path.strip("/") or "index")


def _folder_name(path: str) -> str:
    name = PurePath(path).name
    return name if name not in ("", "..") else os.path.basename(os.path.realpath(path))


def _has_suffix(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _is_hidden(member: str) -> bool:
    """Also within a hidden folder; './' and '../' hide nothing."""
    return any(name.startswith(".") and name not in (".", "..") for name in member.split("/"))


# Folders and patterns


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder on the way down, partly read."""

    path: str
    relative: str
    pattern: Pattern
    identity: tuple[int, int] | None
    entries: Generator[os.DirEntry, None, None]


def _entries(path: str) -> Generator[os.DirEntry, None, None]:
    with os.scandir(path or ".") as entries:
        while chunk := sorted(islice(entries, CHUNK), key=attrgetter("name")):
            if len(chunk) < CHUNK:
                entries.close()  # before anything is done about them: that may take hours
            yield from chunk


class _Walk:
    """Depth first through a folder, where links are not followed upwards, nor twice to the same place (`followed`)."""

    def __init__(self, root: str, relative: str, pattern: Pattern, followed: set[tuple]):
        self.is_answered = False  # has seen what matches, or what cannot be looked into
        self._above = {_identity(parent) for parent in Path(os.path.realpath(root)).parents}
        self._followed = followed
        self._stack = [_Folder(root, relative, pattern, _identity(root), _entries(root))]

    def items(self) -> Iterator[Item]:
        try:
            while self._stack:
                folder = self._stack[-1]
                try:
                    entry = next(folder.entries, None)
                except OSError as error:
                    self.is_answered, entry = True, None
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
        self.is_answered |= () in pattern
        path = os.path.join(folder.path, entry.name)
        relative = f"{folder.relative}/{entry.name}" if folder.relative else entry.name
        if _is_folder(entry):
            if pattern and self._may_enter(entry, pattern):
                self._stack.append(_Folder(path, relative, pattern, _identity(path), _entries(path)))
        elif () in pattern:
            yield from _file(path, relative)

    def _may_enter(self, entry: os.DirEntry, pattern: Pattern) -> bool:
        if not entry.is_symlink():
            return True
        identity = _identity(entry.path)
        is_above = identity in self._above or any(folder.identity == identity for folder in self._stack)
        if is_above or (identity, pattern) in self._followed:
            return False
        self._followed.add((identity, pattern))
        return True


def _unreadable(folder: _Folder, error: OSError) -> Item:
    relative = folder.relative or _relative(_folder_name(folder.path))
    return Item(folder.path, relative, None, error=f"folder cannot be read ({error.strerror})")


def _file(path: str, relative: str) -> Iterator[Item]:
    if _has_suffix(path):
        yield Item(path, relative, os.path.join(".", path) if _NO_PATH.match(path) else path)
    elif path.lower().endswith(".tar"):
        yield from _in_tar(path, relative)


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, say
        return False


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path or ".")
    except OSError:  # gone; that is said when it is read
        return None
    return status.st_dev, status.st_ino


def _match(path: str, followed: set[tuple]) -> Iterator[Item]:
    # Not glob.iglob: it holds folders whole, recurses, and runs for ever in links that lead to each other.
    parts = PurePath(path).parts
    if path.endswith(("/", "**")):  # what is in front must be a folder
        parts += ("*",)
    fixed = list(takewhile(lambda part: not _MAGIC.search(part), parts))
    root = os.path.join("", *fixed)
    if os.path.isdir(root or "."):
        walk = _Walk(root, "", _with_skipped({parts[len(fixed) :]}), followed)
        yield from walk.items()
        if walk.is_answered:
            return
    yield Item(path, _relative(path), None, error="nothing matches this pattern")


def _advance(pattern: Pattern, name: str) -> Pattern:
    """What may follow below `name`; a hidden one is only matched by a pattern with a dot."""
    is_hidden = name.startswith(".")
    after = set()
    for rest in pattern:
        if not rest or rest[0] == "**":
            after |= set() if is_hidden else {rest}
        elif fnmatch(name, rest[0]) and (not is_hidden or rest[0].startswith(".")):
            after.add(rest[1:])
    return _with_skipped(after)


def _with_skipped(pattern: set[tuple[str, ...]]) -> Pattern:
    """`**` may also stand for no folder at all."""
    after = set(pattern)
    for rest in pattern:
        while rest and rest[0] == "**":
            rest = rest[1:]
            after.add(rest)
    return frozenset(after)


# Tars


def _in_tar(tar: str, relative: str) -> Iterator[Item]:
    try:
        with closing(tar_members(tar)) as members:
            for name, member in members:
                yield Item(f"{tar}/{name}", _relative(relative[: -len(".tar")], name), member)
    except ValueError as error:
        yield Item(tar, relative, None, error=str(error).removeprefix(f"{tar}: "))


def _headers(file: BinaryIO, path: str) -> Iterator[tarfile.TarInfo]:
    end = os.fstat(file.fileno()).st_size
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (header := tar.next()) is not None:
                tar.members.clear()  # it would keep all of them
                is_cut = _is_plain(header) and header.offset_data + header.size > end
                if is_cut or header.size < 0 or tar.offset <= header.offset:
                    raise tarfile.ReadError(f"{header.name} is not there whole")
                yield header
            file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # `next` takes a bad header for the end
            raise tarfile.ReadError(f"no member begins at byte {tar.offset}")
    except Exception as error:  # on a damaged file tarfile raises anything
        raise ValueError(f"{path}: the tar is damaged or truncated ({error})") from None


def _is_plain(header: tarfile.TarInfo) -> bool:
    return header.isreg() and not header.issparse()


def _open_regular(path: str) -> BinaryIO:
    if not stat.S_ISREG(os.stat(path).st_mode):  # reading might never end
        raise OSError(errno.EINVAL, "it is a folder, a device or a pipe")
    return open(path, "rb")


# Lists


@dataclass(frozen=True, slots=True)
class _Line:
    text: bytes
    folder: str  # names are meant from here
    name: str  # "list.jsonl:12"
    relative: str


def _in_list(path: str) -> Iterator[Item]:
    item = _json_item if path.lower().endswith(".jsonl") else _text_item
    folder, stem = os.path.dirname(path), "stdin" if path == "-" else PurePath(path).stem
    with nullcontext(sys.stdin.buffer) if path == "-" else _open_list(path) as file:
        for number, text in enumerate(file, 1):
            text = (text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text).removesuffix(b"\n").removesuffix(b"\r")
            if text.strip():
                yield item(_Line(text, folder, f"{path}:{number}", _relative(f"{stem}-{number}")))


def _open_list(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ValueError(f"{path}: the list cannot be read ({error.strerror})") from None


def _text_item(line: _Line) -> Item:
    return _listed(os.fsdecode(line.text), line)


def _json_item(line: _Line) -> Item:
    try:
        record = json.loads(line.text.decode())
    except (ValueError, RecursionError) as error:
        return Item(line.name, line.relative, None, error=f"is not valid JSON ({getattr(error, 'msg', error)})")
    if not isinstance(record, dict):
        return Item(line.name, line.relative, None, error='is not an object; write {"image": PATH}')
    id = str(record["id"]) if _has_type(record.get("id"), (str, int)) else None
    if (problem := _problem(record)) is not None:
        return Item(line.name, line.relative, None, id, error=problem)
    return _listed(record["image"], line, id, record.get("prompt"), record.get("context"))


def _problem(record: dict) -> str | None:
    if record.get("image") in (None, ""):
        return 'has no "image"; give a path, a URL or a data URI'
    for key, types in {"image": (str,), "prompt": (str,), "context": (str,), "id": (str, int)}.items():
        if record.get(key) is not None and not _has_type(record[key], types):
            wanted = " or an integer" if int in types else ""
            return f'"{key}" is {json.dumps(record[key]):.40}, it must be a string{wanted}'
    return None


def _has_type(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _listed(image: str, line: _Line, *own: str | None) -> Item:
    """The item of a line that names `image`."""
    if image[:5].lower() == "data:":
        return Item(line.name, line.relative, image, *own)
    if _URL.match(image):
        return Item(image, _url_relative(image), image, *own)
    near = os.path.join(line.folder, image)
    path = near if os.path.lexists(near) else image
    return Item(path, _relative(image), path, *own)
