"""One picture to caption, found and not read yet."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmvllm.captioning.tars import TarMember

_NO_FILE = re.compile(r"(https?|file|data):", re.IGNORECASE)


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

    @property
    def file(self) -> Path | None:
        """The file that it is, if it is one of its own."""
        if not isinstance(self.source, str) or _NO_FILE.match(self.source):
            return None
        return Path(os.path.expanduser(self.source))  # as `load_image` does
