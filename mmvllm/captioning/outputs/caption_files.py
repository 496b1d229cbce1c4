"""Output formats with one caption file per image or clip."""

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path

from mmvllm.captioning.errors import JobError, explained
from mmvllm.captioning.multi_prompt import caption_lines
from mmvllm.captioning.outputs.atomic_write import replacing, temporary_path
from mmvllm.captioning.outputs.index import Index
from mmvllm.captioning.sources.items import Item, real_name
from mmvllm.processors.digest import digest_of


def _as_json(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False, indent=1)


# Format -> suffix, and the function from a record to the text of its file.
FILE_FORMATS: dict[str, tuple[str, Callable[[dict], str]]] = {
    "txt": (".txt", caption_lines),  # the format that training tools expect
    "webdataset-json": (".json", _as_json),  # as in webdataset shards
}


# The errors for a name that no file or folder can have here.
_OF_NAMES = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EILSEQ)


def _name_of(path: Path) -> str:
    """Return the name of a caption file in the index, which is the same however its path was typed."""
    return digest_of(os.fsencode(real_name(str(path)))).hex()


MAX_FOLDERS = 100  # depth of a caption file below the output folder


def _seconds(time: float | None) -> str:
    """Format a time for a file name, such as 00030 or 00030.5, so that names sort by time."""
    return "end" if time is None else f"{time:09.3f}".rstrip("0").rstrip(".")


def is_missing(path: Path) -> bool:
    """Return whether a caption file is missing, or empty as after a power failure."""
    return not (path.is_file() and path.stat().st_size)


def _kind_of(path: Path, target: Path) -> int | None:
    """Return the mode of the file at `path`, which is `target` or its temporary file; None if there is none yet.

    Raises ValueError if no file can have this path.
    """
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{target}: the caption file cannot be written ({explained(error)})") from None


class CaptionFiles:
    """Chooses the path of each caption file, and writes the files.

    Args:
        format: a name in `FILE_FORMATS`.
        output_dir: the folder that mirrors the folders of the images; None writes beside each image.
        overwrite: replace existing files. Without it, an image whose file exists fails.
        skip_existing: skip images whose file exists.
        suffix: the suffix of the files; by default the suffix of the format.
        keeps_breaks: write captions of several lines as they are.
    """

    def __init__(
        self,
        format: str,
        output_dir: Path | None,
        overwrite: bool,
        skip_existing: bool,
        suffix: str | None = None,
        keeps_breaks: bool = False,
    ):
        self.format, self.output_dir, self._keeps_breaks = format, output_dir, keeps_breaks
        self.suffix = suffix or FILE_FORMATS[format][0]
        self.overwrite, self.skip_existing = overwrite, skip_existing
        self.reserved: set[str] = set()  # real paths of files that the job itself reads or writes

    def path(self, item: Item) -> Path:
        """Return the path of an item's caption file.

        Raises ValueError if the file would be beside an image that is not a file on disk.
        """
        path = item.file if self.output_dir is None else self.output_dir / item.relative
        if path is None:
            raise ValueError("is not a file on disk, so no caption file can be beside it; choose an output folder")
        if item.is_clip:
            return path.with_name(f"{path.stem}.{_seconds(item.start or 0.0)}-{_seconds(item.end)}{self.suffix}")
        return path.with_suffix(self.suffix)

    def skips(self, item: Item) -> bool:
        """Return whether an image is skipped because its caption file exists."""
        with suppress(OSError, ValueError):  # `claim` reports a path that cannot be used
            return self.skip_existing and os.path.lexists(self.path(item))
        return False

    def claim(self, item: Item, key: str, index: Index) -> Path:
        """Reserve and return the path for this item's new file; raises ValueError if it cannot be used.

        The item's record shows the error. Its text names no option, because the reader may not know the command.
        """
        path = self.reserve(item, key, index)
        _kind_of(temporary_path(path), path)  # its path may be too long even if the file's path is not
        if (kind := _kind_of(path, path)) is not None:
            if stat.S_ISDIR(kind):
                raise ValueError(f"{path} is a folder, so it cannot be a caption file; rename one, or use jsonl")
            if not self.overwrite:
                raise ValueError(f"{path} exists already; allow overwriting, or skip existing caption files")
        if path.parent.is_dir() and not os.access(path.parent, os.W_OK | os.X_OK):
            raise ValueError(f"{path.parent} is not writable; choose an output folder")
        return path

    def reserve(self, item: Item, key: str, index: Index) -> Path:
        """Reserve and return the path for this item's file, and make its folder; raises ValueError as `claim` does."""
        path = self.path(item)
        if os.path.realpath(path) in self.reserved:
            raise ValueError(f"{path} is read or written by the job itself; choose an output folder, or rename one")
        self._make_folders(path.parent, index)
        self.claim_path(path, key, index)
        return path

    def claim_path(self, path: Path, key: str, index: Index) -> None:
        """Reserve a path for one image; raises ValueError if another image has it."""
        if not index.claim_file(_name_of(path), key, path):
            raise ValueError(f"{path} is the caption file of another image with this name; rename one, or use jsonl")

    def _make_folders(self, folder: Path, index: Index) -> None:
        """Make the folder of a caption file below the output folder; raises ValueError if its name cannot be used.

        A hostile name in a tar or a list thus fails only its image. Other errors, such as a folder that is not
        writable, end the job with JobError.
        """
        if self.output_dir is None:
            return
        names = folder.relative_to(self.output_dir).parts
        if len(names) > MAX_FOLDERS:
            raise ValueError(f"is in {len(names)} folders, at most {MAX_FOLDERS} are made below the output folder")
        for one in accumulate(names, Path.joinpath, initial=self.output_dir):
            if one != self.output_dir and index.is_file_claimed(_name_of(one)):
                raise ValueError(f"{one} is the caption file of another image; rename one, or use jsonl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in _OF_NAMES:
                raise JobError.cannot_write(folder, error) from error
            raise ValueError(f"{folder}: the folder cannot be made ({explained(error)})") from None

    def write(self, record: dict, path: Path) -> None:
        """Write a record's caption file atomically; raises JobError if that fails.

        A link with its name is replaced, because a folder of images from someone else may contain links to anywhere.
        Folders are made only below the output folder; the folder of an image exists, unless the image is gone.
        """
        _, render = FILE_FORMATS[self.format]
        if self._keeps_breaks and render is caption_lines:
            render = partial(caption_lines, keeps_breaks=True)
        try:
            if self.output_dir is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(f"{render(record)}\n")
        except OSError as error:
            raise JobError.cannot_write(path, error) from error
