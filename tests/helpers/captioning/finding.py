"""Folders and tar files of images, and what `find_items` finds in them."""

import io
import tarfile
from pathlib import Path

from mmvllm.captioning.sources.find import find_items


def put(folder: Path, *names: str) -> Path:
    """Create empty files, and their folders."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def relatives(*paths: object) -> list[str]:
    """The relative paths of the items, none of which may have an error."""
    found = list(find_items(list(map(str, paths))))
    assert [item.error for item in found] == [None] * len(found)
    return [item.relative for item in found]


def errors(*paths: object) -> dict[str, str | None]:
    return {item.path: item.error for item in find_items(list(map(str, paths)))}


def make_tar(path: Path, members: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return path
