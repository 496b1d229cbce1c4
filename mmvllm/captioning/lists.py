"""Reads the images that text and JSONL lists name, line by line."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO

from mmvllm.captioning.items import Item
from mmvllm.captioning.names import URL, relative_of_url, relative_path

SUFFIXES = (".jsonl", ".lst", ".txt")


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
        for number, text in enumerate(file, 1):
            text = (text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text).removesuffix(b"\n").removesuffix(b"\r")
            if text.strip():
                yield item(_Line(text, folder, f"{path}:{number}", relative_path(f"{stem}-{number}")))


def _open_stdin() -> BinaryIO:
    # Not sys.stdin.buffer: a thread blocked in its readline holds a lock that the interpreter needs to exit.
    return open(0, "rb", closefd=False)


def open_list(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ValueError(f"{path}: the list cannot be read ({error.strerror})") from None


def _text_item(line: _Line) -> Item:
    try:
        return _listed(os.fsdecode(line.text), line)
    except UnicodeDecodeError:  # on Windows, where names are Unicode
        return Item(line.name, line.relative, None, error="is not UTF-8 text")


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
    """The item for a line that names `image`; a path is tried below the list's folder first."""
    if image[:5].lower() == "data:":
        return Item(line.name, line.relative, image, *own)
    if URL.match(image):
        return Item(image, relative_of_url(image), image, *own)
    near = os.path.join(line.folder, image)
    path = near if os.path.lexists(near) else image
    return Item(path, relative_path(image), path, *own)
