"""One image to caption, before it is read."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmvllm.captioning.tars import TarMember

_NO_FILE = re.compile(r"(https?|file|data):", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Item:
    """An image to caption.

    Args:
        path: its name in the record: a file's path, a URL, "shard.tar/member.jpg", or "list.jsonl:12" (line 12).
        relative: its path below an output folder, separated by '/'; never empty, absolute or with '..'.
        source: what to load: a path, URL, data URI or tar member; None if there is an `error`.
        id, prompt, context: those of this image, from a JSONL list.
        beside: the text of the file beside the image, with `context_from`; `context` takes its place.
        error: why there is nothing to load.
    """

    path: str
    relative: str
    source: str | TarMember | None
    id: str | None = None
    prompt: str | None = None
    context: str | None = None
    error: str | None = None
    beside: str | None = None

    def read(self) -> Any:
        """The argument for `load_image`. Raises ValueError with `error`, or if a tar member cannot be read."""
        if self.error is not None:
            raise ValueError(self.error)
        return self.source.read() if isinstance(self.source, TarMember) else self.source

    @property
    def file(self) -> Path | None:
        """The image's file; None for URLs, data URIs, tar members and errors."""
        if not isinstance(self.source, str) or _NO_FILE.match(self.source):
            return None
        return Path(os.path.expanduser(self.source))  # as `load_image` does
