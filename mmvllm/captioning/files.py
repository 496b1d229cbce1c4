"""Output formats with one caption file per image or clip."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from mmvllm.captioning.errors import JobError, explained
from mmvllm.captioning.index import Index
from mmvllm.captioning.items import Item, real_name
from mmvllm.captioning.replacing import replacing
from mmvllm.captioning.several import caption_lines


def _as_json(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False, indent=1)


# Format -> suffix, and the function from a record to the text of its file.
FILE_FORMATS: dict[str, tuple[str, Callable[[dict], str]]] = {
    "txt": (".txt", caption_lines),  # as training tools expect it
    "webdataset-json": (".json", _as_json),  # as in webdataset shards
}


def _seconds(time: float | None) -> str:
    """A time in a file's name, in an order that is that of names: 00030 or 00030.5."""
    return "end" if time is None else f"{time:09.3f}".rstrip("0").rstrip(".")


class CaptionFiles:
    """Chooses the path of each caption file, and writes the files.

    Args:
        format: a name in `FILE_FORMATS`.
        output_dir: the folder in which the tree of the images is mirrored; None is beside each image.
        overwrite: replace existing files. Without it, an image whose file exists fails.
        skip_existing: leave out images whose file exists.
        suffix: that of the files; by default the format's.
    """

    def __init__(
        self,
        format: str,
        output_dir: Path | None,
        overwrite: bool,
        skip_existing: bool,
        suffix: str | None = None,
    ):
        self.format, self.output_dir = format, output_dir
        self.suffix = suffix or FILE_FORMATS[format][0]
        self.overwrite, self.skip_existing = overwrite, skip_existing
        self.reserved: set[str] = set()  # real paths of files that the job itself reads or writes

    def path(self, item: Item) -> Path | None:
        """The path of an item's caption file; None if it would be beside an image that is not a file of its own."""
        path = item.file if self.output_dir is None else self.output_dir / item.relative
        if path is None:
            return None
        if item.is_clip:
            return path.with_name(f"{path.stem}.{_seconds(item.start or 0.0)}-{_seconds(item.end)}{self.suffix}")
        return path.with_suffix(self.suffix)

    def skips(self, item: Item) -> bool:
        """Whether an image is left out because its caption file exists."""
        with suppress(OSError, ValueError):  # a path that cannot be used is an error in `claim`
            path = self.path(item)
            return self.skip_existing and path is not None and path.exists()
        return False

    def claim(self, item: Item, index: Index) -> Path:
        """Reserve the path for this item. Raises ValueError, whose text the item's record shows, if it cannot be used.

        Records are read without the command or call that made them, so the texts name no option.
        """
        path = self.path(item)
        if path is None:
            raise ValueError("is not a file of its own, so no caption file can be beside it; choose an output folder")
        if os.path.realpath(path) in self.reserved:
            raise ValueError(f"{path} is read or written by the job itself; choose an output folder, or rename one")
        if not self.claim_path(path, index):
            raise ValueError(f"{path} is the caption file of another image with this name; rename one, or use jsonl")
        try:
            if path.exists() and not self.overwrite:
                raise ValueError(f"{path} exists already; allow overwriting, or skip existing caption files")
        except OSError as error:
            raise ValueError(f"{path}: the caption file cannot be written ({explained(error)})") from None
        if path.parent.is_dir() and not os.access(path.parent, os.W_OK | os.X_OK):
            raise ValueError(f"{path.parent} is not writable; choose an output folder")
        return path

    def claim_path(self, path: Path, index: Index) -> bool:
        """Reserve a path for one image; False if another image has it."""
        return index.claim(f"file {xxhash.xxh3_128_hexdigest(os.fsencode(real_name(str(path))))}")

    def write(self, record: dict, path: Path | None = None) -> None:
        """Write a record's file, or another, completely or not at all; raises JobError if that fails.

        Folders are made below the output folder only: the folder of an image exists, unless the image is gone.
        """
        path = path or Path(record["file"])
        _, render = FILE_FORMATS[self.format]
        try:
            if self.output_dir is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                text = f"{render(record)}\n"
                temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        except OSError as error:
            raise JobError.cannot_write(path, error) from error
