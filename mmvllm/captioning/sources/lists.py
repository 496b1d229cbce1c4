"""Reads text and JSONL lists of images and videos, line by line."""

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from pathlib import PurePath
from typing import Any, BinaryIO

from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.names import URL, is_video_name, relative_of_url, relative_path
from mmvllm.utils.text import check_json_size, marked_encoding, parse_json

SUFFIXES = (".jsonl", ".lst", ".txt")
MAX_SECONDS = 1e9
MAX_LINE_BYTES = 128 << 20  # more than an image takes as a data URI
MAX_NAME = 65_536  # characters of a path or a URL
MAX_LENGTHS = {"id": 1024, "prompt": 2**20, "context": 2**20}  # characters; records contain the id and the prompt
MAX_UNICODE_BYTES = 32 << 20  # of a line with non-ASCII characters: one of them can quadruple the memory of a text
NOT_ASCII = "is a data URI with characters that are not ASCII"
MAX_LINE_VALUES = 100_000  # as `check_json_size` counts them
_STRING, _SECONDS = ("a string", (str,)), ("a number of seconds", (int, float))
_TYPES = {
    **dict.fromkeys(("image", "video", "prompt", "context"), _STRING),
    "id": ("a string or an integer", (str, int)),
    **dict.fromkeys(("start", "end"), _SECONDS),
}


# Keys that name the file in common lists of images: data sets of the hub, of trainers and of annotation tools, and
# mmvllm's own records. A file is a video if its name is that of one.
_FILE_KEYS = (
    *("path", "file_name", "filename", "file_path", "filepath", "file", "image_path", "img_path", "image_file", "img"),
    *("image_url", "url", "video_path", "video_file", "video_url", "images", "videos"),
)
_OWN = {"path", "settings", "key", "digest"}  # keys of mmvllm's records


@dataclass(frozen=True, slots=True)
class _Line:
    text: bytes
    folder: str  # names are relative to it
    name: str  # "list.jsonl:12"
    relative: str


def in_list(path: str) -> Iterator[Item]:
    item = _json_item if path.lower().endswith(".jsonl") else _text_item
    folder, stem = os.path.dirname(path), "stdin" if path == "-" else PurePath(path).stem
    with _open_stdin() if path == "-" else open_list(path) as file:
        for number, text in enumerate(_lines(in_utf_8(file)), 1):
            is_long = len(text) > MAX_LINE_BYTES
            text = (text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text).removesuffix(b"\n").removesuffix(b"\r")
            line = _Line(text, folder, f"{path}:{number}", relative_path(f"{stem}-{number}"))
            if is_long:
                yield _failed(line, f"has more than {MAX_LINE_BYTES >> 20} MiB")
            elif b"\0" in text:  # for example in a sparse file, whose lines would take gigabytes of memory
                yield _failed(line, "has a NUL character")
            elif text.strip():
                yield item(line)


def in_utf_8(file: BufferedReader) -> BinaryIO:
    """Return a list in UTF-8; one in UTF-16, as Windows PowerShell writes it, is recognized by its byte order mark."""
    encoding = marked_encoding(file.peek(2)[:2])
    return file if encoding is None else _Recoded(file, encoding, errors="replace", newline="\n")


class _Recoded(TextIOWrapper):
    def readline(self, size: int = -1) -> bytes:
        return super().readline(size).encode("utf-8", "surrogatepass")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a list; a line that is too long, and may never end, is cut off."""
    while text := file.readline(MAX_LINE_BYTES + 1):
        yield text
        while len(text) > MAX_LINE_BYTES and not text.endswith(b"\n"):
            text = file.readline(MAX_LINE_BYTES + 1)


def _open_stdin() -> BufferedReader:
    # Not sys.stdin.buffer: a thread blocked in its readline holds a lock that the interpreter needs to exit.
    return open(0, "rb", closefd=False)


def open_list(path: str) -> BufferedReader:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ValueError(f"{path}: the list cannot be read ({error.strerror})") from None


def _failed(line: _Line, error: str, *own: str | None) -> Item:
    return Item(line.name, line.relative, None, *own, error=error)


def _text_item(line: _Line) -> Item:
    is_data, is_ascii = line.text[:5].lower() == b"data:", line.text.isascii()
    if is_data and not is_ascii:
        return _failed(line, NOT_ASCII)
    if not is_data and len(line.text) > 4 * MAX_NAME:
        return _failed(line, f"is not a path or URL: it has {len(line.text)} bytes")
    name = os.fsdecode(line.text)
    return dataclasses.replace(_listed(name, line), is_video=is_video_name(name))


def _json_item(line: _Line) -> Item:
    if len(line.text) > MAX_UNICODE_BYTES and not line.text.isascii():
        most = f"{MAX_UNICODE_BYTES >> 20} MiB"
        return _failed(line, f"has more than {most} and characters that are not ASCII; write them as \\u escapes")
    try:
        check_json_size(line.text, MAX_LINE_VALUES)
        record = parse_json(line.text.decode())
    except ValueError as error:
        return _failed(line, f"is not valid JSON ({getattr(error, 'msg', error)})")
    if not isinstance(record, dict):
        return _failed(line, 'is not an object; write {"image": PATH}')
    record = _with_known_keys(record)
    id = str(record["id"])[: MAX_LENGTHS["id"]] if _has_type(record.get("id"), (str, int)) else None
    if (problem := _problem(record)) is not None:
        return _failed(line, problem, id)
    own = (id, record.get("prompt"), record.get("context"))
    if "image" in record:
        return _listed(record["image"], line, *own)
    start, end = (float(record[key]) if key in record else None for key in ("start", "end"))
    part = "" if start is None and end is None else f"{start}-{end}"
    clip = {"is_video": True, "start": start, "end": end, "part": part}
    return dataclasses.replace(_listed(record["video"], line, *own), **clip)


def _with_known_keys(record: dict) -> dict:
    """Return an entry of a list without nulls, with its file as "image" or "video"; of mmvllm's records, no more."""
    names = ("path", "id", "start", "end") if record.keys() >= _OWN else record
    record = {name: value for name in names if (value := record.get(name)) is not None}
    if {"image", "video"} & record.keys():
        return record
    file = next((record[key] for key in _FILE_KEYS if key in record), None)
    if isinstance(file, list) and len(file) == 1:
        file = file[0]
    if file is None:
        return record
    return record | {"video" if isinstance(file, str) and is_video_name(file) else "image": file}


def _problem(record: dict) -> str | None:
    """Return what is wrong with an entry of a list, or None."""
    if "image" in record and "video" in record:
        return 'has both "image" and "video"; give one of them'
    if record.get("image", record.get("video", "")) == "":
        return 'has no "image" or "video"; give a path, a URL or a data URI'
    for key, (wanted, types) in _TYPES.items():
        if key in record and not _has_type(record[key], types):
            return f'"{key}" must be {wanted}, got {json.dumps(record[key]):.40}'
        text = str(record.get(key, ""))
        if "\0" in text:
            return f'"{key}" has a NUL character'
        if len(text) > MAX_LENGTHS.get(key, len(text)):
            return f'"{key}" must have at most {MAX_LENGTHS[key]} characters, got {len(text)}'
    return _problem_of_range(record)


def _problem_of_range(record: dict) -> str | None:
    if "image" in record and ("start" in record or "end" in record):
        return '"start" and "end" go with "video"'
    if not 0 <= record.get("start", 0) < record.get("end", MAX_SECONDS) <= MAX_SECONDS:
        return '"start" and "end" are seconds with 0 <= start < end'
    return None


def _has_type(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _listed(name: str, line: _Line, *own: str | None) -> Item:
    """Return the item for the path, URL or data URI in a line; a path is first tried below the list's folder."""
    if name[:5].lower() == "data:":
        return Item(line.name, line.relative, name, *own) if name.isascii() else _failed(line, NOT_ASCII, *own)
    if len(name) > MAX_NAME:
        return _failed(line, f"is not a path or URL: it has {len(name)} characters", *own)
    if URL.match(name):
        return Item(name, relative_of_url(name), name, *own)
    near = os.path.join(line.folder, name)
    path = near if os.path.lexists(near) else name
    return Item(path, relative_path(name), path, *own)
