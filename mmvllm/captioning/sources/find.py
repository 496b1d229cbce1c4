"""Finds the images and videos that paths, glob patterns, tar shards and lists name, lazily.

No image is read here, and no folder or list is held in memory, so a run over millions of images starts at once.
"""

import os
from collections.abc import Iterator, Sequence
from os.path import splitext
from pathlib import PurePath

from mmvllm.captioning.sources import lists
from mmvllm.captioning.sources.counts import Counts
from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.lists import in_list, open_list
from mmvllm.captioning.sources.names import (
    URL,
    folder_name,
    is_media_name,
    is_video_name,
    kind_of_file,
    relative_of_url,
    relative_path,
)
from mmvllm.captioning.sources.tars import PACKED
from mmvllm.captioning.sources.walk import EVERYTHING, MAGIC, Walk, in_tar, match_pattern


def find_items(paths: Sequence[str | os.PathLike], ignored: Counts | None = None) -> Iterator[Item]:
    """Find the images and videos in folders, glob patterns, tar shards, lists ("-" is standard input), URLs and files.

    Folders are walked depth first and sorted, in chunks of `CHUNK` entries. A folder, tar or list line that cannot be
    read yields an item with an error. Other files in folders and tars, and hidden ones, are counted in `ignored`; so
    are texts that are given together with an image of the same name, as by `photos/*`: they are captions, not lists.

    Raises ValueError, before the search, for a list that cannot be read and for a path that does not exist.
    """
    given = [os.fsdecode(path) for path in paths]
    for path in given:
        is_pipe = os.path.exists(path) and not os.path.isfile(
            path
        )  # opening and closing a pipe as a test would break its writer
        if path != "-" and _kind(path) == "list" and not is_pipe:
            open_list(path).close()
        if _kind(path) == "file" and not is_media_name(path) and not os.path.lexists(path):
            raise ValueError(f"{path}: there is no such file or folder")
    return _find(given, Counts() if ignored is None else ignored)


def _kind(path: str) -> str:
    if path == "-":
        return "list"
    if URL.match(path):
        return "url"
    if os.path.isdir(path):
        return "folder"
    if MAGIC.search(path) and not os.path.lexists(path):
        return "pattern"
    if path.lower().endswith(".tar") or PACKED.search(path):
        return "tar"
    return "list" if path.lower().endswith(lists.SUFFIXES) else "file"


def _find(paths: list[str], ignored: Counts) -> Iterator[Item]:
    followed: set[tuple] = set()
    stems = {splitext(path)[0] for path in paths if is_media_name(path)}
    for path in paths:
        kind, (stem, suffix) = _kind(path), splitext(path)
        if suffix.lower() == ".txt" and stem in stems:
            ignored.add(kind_of_file(path))
        elif kind == "folder":
            name = folder_name(path) if len(paths) > 1 else ""
            yield from Walk(path, name, EVERYTHING, followed, ignored).items()
        elif kind == "pattern":
            yield from match_pattern(path, followed, ignored)
        elif kind == "tar":
            yield from in_tar(path, relative_path(PurePath(path).name), ignored)
        elif kind == "list":
            yield from in_list(path)
        else:
            relative = relative_of_url(path) if kind == "url" else relative_path(PurePath(path).name)
            yield Item(path, relative, path, is_video=is_video_name(path))
