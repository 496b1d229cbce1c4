"""One image or clip to caption, before it is read."""

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmvllm.captioning.sources.names import MAX_PATH
from mmvllm.captioning.sources.tars import TarMember

_NO_FILE = re.compile(r"(https?|file|data):", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Item:
    """An image, a video or a clip of a video to caption.

    Args:
        path: its name in the record: a file's path, a URL, "shard.tar/member.jpg", or "list.jsonl:12" (line 12).
        relative: its path below an output folder, separated by '/'; never empty, absolute or with '..'.
        source: what to load: a path, URL, data URI or tar member; None if there is an `error`.
        id, prompt, context: from the entry of a JSONL list.
        beside: the text of the `context_from` file beside the image; `context` takes precedence.
        error: why it cannot be loaded.
        is_video: whether it is a video, or a clip of one.
        start, end: the range of a clip in seconds of its video; None is the beginning, or the end, of the video.
        part: text that distinguishes the clips of a video in their keys; "" for the first clip or the whole video.
        joins_retry: whether `retry_failed` takes this clip even without a record: its video's first clip has failed.
    """

    path: str
    relative: str
    source: str | TarMember | None
    id: str | None = None
    prompt: str | None = None
    context: str | None = None
    error: str | None = None
    beside: str | None = None
    is_video: bool = False
    start: float | None = None
    end: float | None = None
    part: str = ""
    joins_retry: bool = False

    @property
    def is_clip(self) -> bool:
        """Whether the item is only a part of its video."""
        return self.start is not None or self.end is not None

    def read(self) -> Any:
        """Return the input of `load_image` or `load_video`; raises ValueError for an `error` or an unreadable tar."""
        if self.error is not None:
            raise ValueError(self.error)
        return self.source.read() if isinstance(self.source, TarMember) else self.source

    @property
    def num_bytes(self) -> int:
        """Size of the file or tar member in bytes; 0 if it is not known before it is read."""
        if isinstance(self.source, TarMember):
            return self.source.size
        try:
            return 0 if self.file is None else self.file.stat().st_size
        except (OSError, ValueError):
            return 0

    @property
    def file(self) -> Path | None:
        """The image's file; None for URLs, data URIs, tar members and errors."""
        if not isinstance(self.source, str) or _NO_FILE.match(self.source):
            return None
        return Path(os.path.expanduser(self.source))  # as `load_image` does

    @property
    def real_path(self) -> str:
        """`path`, absolute and with links to folders resolved, so that it is equal however the path was typed.

        It is unchanged for URLs, lines of standard input and items without a source. A link to a file keeps its name,
        because it is a separate image with a separate caption file.
        """
        if self.source is None:
            return self.path
        if isinstance(self.source, TarMember):
            return f"{real_name(self.source.tar)}{self.path.removeprefix(self.source.tar)}"
        return real_name(self.path if self.file is None else str(self.file))


def item_of(messages: list[dict]) -> Item:
    """Return the item in the messages of a request, where `CaptionSettings.request` puts it first."""
    media = messages[-1]["content"][0]
    return media[media["type"]]


def real_name(path: str) -> str:
    """Resolve links in the folder of a path; URLs, "-:12" (standard input) and impossible paths are unchanged."""
    if len(path) > MAX_PATH or _NO_FILE.match(path) or path.startswith("-:"):
        return path
    try:
        return os.path.join(real_folder(os.path.dirname(path), os.getcwd()), os.path.basename(path))
    except (OSError, ValueError):  # a link to itself, or a NUL
        return path


@lru_cache(maxsize=1024)  # images of a list may alternate between many folders
def real_folder(path: str, here: str) -> str:
    """Return the real path of a folder, relative to the working directory `here`; every run clears the cache."""
    return os.path.realpath(os.path.join(here, path))
