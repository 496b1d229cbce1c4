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
    "txt": (".txt", caption_lines),  # the format that training tools expect
    "webdataset-json": (".json", _as_json),  # as in webdataset shards
}


# The errors for a name that no file or folder can have here.
_OF_NAMES = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EILSEQ)


def _key_of(path: Path) -> str:
    """Return the key of a caption file's path in the index."""
    return f"file {digest_of(os.fsencode(real_name(str(path)))).hex()}"


MAX_FOLDERS = 100  # depth of a caption file below the output folder

_RANGE = r"(?:\.\d+(?:\.\d+)?-(?:\d+(?:\.\d+)?|end))"  # of a clip, see `_seconds`


def _seconds(time: float | None) -> str:
    """Format a time for a file name, such as 00030 or 00030.5, so that names sort by time."""
    return "end" if time is None else f"{time:09.3f}".rstrip("0").rstrip(".")


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
        """Return the path of an item's caption file; None if it would be beside an image that is not a file on disk."""
        path = item.file if self.output_dir is None else self.output_dir / item.relative
        if path is None:
            return None
        if item.is_clip:
            return path.with_name(f"{path.stem}.{_seconds(item.start or 0.0)}-{_seconds(item.end)}{self.suffix}")
        return path.with_suffix(self.suffix)

    def is_name_for(self, name: str, image: str) -> bool:
        """Return whether `name` can be the name of a caption file for an image or a video named `image`."""
        stem = re.escape(Path(image).stem)
        return is_media_name(image) and re.fullmatch(rf"{stem}{_RANGE}?{re.escape(self.suffix)}", name) is not None

    def skips(self, item: Item) -> bool:
        """Return whether an image is skipped because its caption file exists."""
        with suppress(OSError, ValueError):  # `claim` reports a path that cannot be used
            path = self.path(item)
            return self.skip_existing and path is not None and os.path.lexists(path)
        return False

    def claim(self, item: Item, index: Index) -> Path:
        """Reserve and return the path for this item; raises ValueError if it cannot be used.

        The item's record shows the error. Its text names no option, because the reader may not know the command.
        """
        path = self.path(item)
        if path is None:
            raise ValueError("is not a file on disk, so no caption file can be beside it; choose an output folder")
        if os.path.realpath(path) in self.reserved:
            raise ValueError(f"{path} is read or written by the job itself; choose an output folder, or rename one")
        self._make_folders(path.parent, index)
        if not self.claim_path(path, index):
            raise ValueError(f"{path} is the caption file of another image with this name; rename one, or use jsonl")
        _kind_of(temporary_path(path), path)  # its path may be too long even if the file's path is not
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
            if one != self.output_dir and index.recorded_as(_key_of(one)) is not None:
                raise ValueError(f"{one} is the caption file of another image; rename one, or use jsonl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in _OF_NAMES:
                raise JobError.cannot_write(folder, error) from error
            raise ValueError(f"{folder}: the folder cannot be made ({explained(error)})") from None

    def write(self, record: dict, path: Path | None = None) -> None:
        """Write a record's caption file, at `path` if given, atomically; raises JobError if that fails.

        A link with its name is replaced, because a folder of images from someone else may contain links to anywhere.
        Folders are made only below the output folder; the folder of an image exists, unless the image is gone.
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
