"""A caption file for every picture: NAME.txt as trainers expect it, or NAME.json as webdataset shards have it."""

import json
import os
from contextlib import suppress
from pathlib import Path

import xxhash

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.index import Index
from mmvllm.captioning.items import Item
from mmvllm.captioning.replacing import replacing

SUFFIXES = {"txt": ".txt", "webdataset-json": ".json"}


class CaptionFiles:
    """Writes a file for each record that names one, and says where it goes.

    Args:
        format: "txt" (the caption) or "webdataset-json" (the whole record).
        output_dir: mirror the pictures' folders there; None is beside each picture.
        overwrite: replace files that are there; without it such a picture is refused, or with `skip_existing` left.
    """

    def __init__(self, format: str, output_dir: Path | None, overwrite: bool, skip_existing: bool):
        self.format, self.output_dir = format, output_dir
        self.overwrite, self.skip_existing = overwrite, skip_existing
        self.reserved: set[str] = set()  # real paths that are no place for a caption

    def path(self, item: Item) -> Path | None:
        """Where an item's caption goes; None if it would be beside a picture that is no file of its own."""
        if self.output_dir is not None:
            return (self.output_dir / item.relative).with_suffix(SUFFIXES[self.format])
        return None if item.file is None else item.file.with_suffix(SUFFIXES[self.format])

    def skips(self, item: Item) -> bool:
        """Whether a picture is left alone because its caption file is there."""
        with suppress(OSError, ValueError):  # no place for it, which `claim` says
            path = self.path(item)
            return self.skip_existing and path is not None and path.exists()
        return False

    def claim(self, item: Item, index: Index) -> Path:
        """The path for this item and no other; raises ValueError where there is none to be had."""
        path = self.path(item)
        if path is None:
            raise ValueError("its caption has no place beside it; give --output-dir")
        if os.path.realpath(path) in self.reserved:
            raise ValueError(f"{path} is read or written by the job itself; give --output-dir, or rename one")
        if not index.claim(_key(path)):
            raise ValueError(f"{path} is the caption of another picture with this name; rename one, or use jsonl")
        try:
            if path.exists() and not self.overwrite:
                raise ValueError(
                    f"{path} is there already; --overwrite replaces it, --skip-existing leaves the picture"
                )
        except OSError as error:
            raise ValueError(f"{path}: its caption cannot be written ({error.strerror})") from None
        if path.parent.is_dir() and not os.access(path.parent, os.W_OK | os.X_OK):
            raise ValueError(f"{path.parent} cannot be written to; give --output-dir")
        return path

    def write(self, record: dict) -> None:
        """Write a record's file, whole or not at all; raises JobError where that fails."""
        path = Path(record["file"])
        text = record["caption"] if self.format == "txt" else json.dumps(record, ensure_ascii=False, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise JobError(f"{path} cannot be written: {error.strerror}") from error

    def restore(self, record: dict, index: Index) -> None:
        """Write a file that its record says should be there, and that a killed run or its user took away."""
        path = Path(record["file"])
        index.claim(_key(path))
        # Empty after a power failure, say. Without the folder, the job was started from another place.
        if path.parent.is_dir() and not (path.exists() and path.stat().st_size):
            self.write(record)


def _key(path: Path) -> str:
    return f"file {xxhash.xxh3_128_hexdigest(os.fsencode(path))}"
