"""Output formats with one caption file per image or clip."""

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from mmvllm.captioning.errors import JobError, explained
from mmvllm.captioning.multi_prompt import caption_lines
from mmvllm.captioning.outputs.atomic_write import replacing, temporary_path
from mmvllm.captioning.outputs.index import Index
from mmvllm.captioning.sources.items import Item, real_name
from mmvllm.captioning.sources.names import is_media_name
from mmvllm.processors.digest import digest_of


def _as_json(record: dict) -> str:
    return json.dumps(record, ensure_ascii=False, indent=1)


# Format -> suffix, and the function from a record to the text of its file.
FILE_FORMATS: dict[str, tuple[str, Callable[[dict], str]]] = {
    "txt": (".txt", caption_lines),  # as training tools expect it
    "webdataset-json": (".json", _as_json),  # as in webdataset shards
}


# Why a name cannot be that of a file or a folder here.
_OF_NAMES = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EILSEQ)


def _key_of(path: Path) -> str:
    """Return the key under which the index has the path of a caption file."""
    return f"file {digest_of(os.fsencode(real_name(str(path)))).hex()}"


MAX_FOLDERS = 100  # of a caption file below the output folder, one within the other

_RANGE = r"(?:\.\d+(?:\.\d+)?-(?:\d+(?:\.\d+)?|end))"  # of a clip, see `_seconds`


def _seconds(time: float | None) -> str:
    """A time in a file's name, in an order that is that of names: 00030 or 00030.5."""
    return "end" if time is None else f"{time:09.3f}".rstrip("0").rstrip(".")


def _kind_of(path: Path, target: Path) -> int | None:
    """The kind of a file that has to do with the caption file `target`; None if there is none yet.

    Raises ValueError if there can be none.
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
        """The path of an item's caption file; None if it would be beside an image that is not a file on disk."""
        path = item.file if self.output_dir is None else self.output_dir / item.relative
        if path is None:
            return None
        if item.is_clip:
            return path.with_name(f"{path.stem}.{_seconds(item.start or 0.0)}-{_seconds(item.end)}{self.suffix}")
        return path.with_suffix(self.suffix)

    def is_name_for(self, name: str, image: str) -> bool:
        """Whether a caption file beside an image or a video of this name could be called so."""
        stem = re.escape(Path(image).stem)
        return is_media_name(image) and re.fullmatch(rf"{stem}{_RANGE}?{re.escape(self.suffix)}", name) is not None

    def skips(self, item: Item) -> bool:
        """Whether an image is left out because its caption file exists."""
        with suppress(OSError, ValueError):  # a path that cannot be used is an error in `claim`
            path = self.path(item)
            return self.skip_existing and path is not None and os.path.lexists(path)
        return False

    def claim(self, item: Item, index: Index) -> Path:
        """Reserve the path for this item. Raises ValueError, whose text the item's record shows, if it cannot be used.

        Records are read without the command or call that made them, so the texts name no option.
        """
        path = self.path(item)
        if path is None:
            raise ValueError("is not a file on disk, so no caption file can be beside it; choose an output folder")
        if os.path.realpath(path) in self.reserved:
            raise ValueError(f"{path} is read or written by the job itself; choose an output folder, or rename one")
        self._make_folders(path.parent, index)
        if not self.claim_path(path, index):
            raise ValueError(f"{path} is the caption file of another image with this name; rename one, or use jsonl")
        _kind_of(temporary_path(path), path)  # whose path may be too long where that of the file is not
        if (kind := _kind_of(path, path)) is not None:
            if stat.S_ISDIR(kind):
                raise ValueError(f"{path} is a folder, so it cannot be a caption file; rename one, or use jsonl")
            if not self.overwrite:
                raise ValueError(f"{path} exists already; allow overwriting, or skip existing caption files")
        if path.parent.is_dir() and not os.access(path.parent, os.W_OK | os.X_OK):
            raise ValueError(f"{path.parent} is not writable; choose an output folder")
        return path

    def claim_path(self, path: Path, index: Index) -> bool:
        """Reserve a path for one image; False if another image has it."""
        return index.claim(_key_of(path))

    def _make_folders(self, folder: Path, index: Index) -> None:
        """Make the folder of a caption file below the output folder; raises ValueError if its name cannot be one.

        Images whose names in a tar or a list are hostile fail by themselves; a folder that cannot be written to, for
        example, is the end of the job (JobError).
        """
        if self.output_dir is None:
            return
        names = folder.relative_to(self.output_dir).parts
        if len(names) > MAX_FOLDERS:
            raise ValueError(f"is in {len(names)} folders, at most {MAX_FOLDERS} are made below the output folder")
        for one in accumulate(names, Path.joinpath, initial=self.output_dir):
            if one != self.output_dir and index.recorded_as(_key_of(one)) is not None:
                raise ValueError(f"{one} is the caption file of another image; rename one, or use jsonl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in _OF_NAMES:
                raise JobError.cannot_write(folder, error) from error
            raise ValueError(f"{folder}: the folder cannot be made ({explained(error)})") from None

    def write(self, record: dict, path: Path | None = None) -> None:
        """Write a record's file, or another, completely or not at all; raises JobError if that fails.

        A link in its place is replaced: images may come from others, and with them links to anywhere. Folders are made
        below the output folder only: the folder of an image exists, unless the image is gone.
        """
        path = path or Path(record["file"])
        _, render = FILE_FORMATS[self.format]
        try:
            if self.output_dir is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(f"{render(record)}\n")
        except OSError as error:
            raise JobError.cannot_write(path, error) from error
