"""Reads text files beside images, such as the tags in a training folder, as context for the prompt."""

import errno
import os
import re
import stat
from functools import partial
from pathlib import Path

from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.names import is_media_name
from mmvllm.errors import ArgumentError
from mmvllm.utils.text import decode_text
from mmvllm.utils.time_limit import TimeIsOver, TimeLimit

MODES = ("prepend", "append")
MAX_BYTES = 64 * 1024
_SUFFIX = re.compile(r"(\.[\w-]+)+")


def check_suffix(argument: str, suffix: str) -> None:
    """Raise ArgumentError, naming the argument, if files beside images cannot have this suffix."""
    if not _SUFFIX.fullmatch(suffix):
        problem = "give a dot and then letters, digits, - or _, as in .caption"
    elif is_media_name(f"image{suffix}") or suffix.lower().endswith(".tar"):
        problem = "files with this suffix are searched for images; give another one"
    else:
        return
    raise ArgumentError(f"{{{argument}}} is {{suffix!r}}: {problem}", suffix=suffix)


def check_context(suffix: str | None, mode: str) -> None:
    """Raise ArgumentError if context cannot be read from files with this suffix, or if the mode is unknown."""
    if mode not in MODES:
        raise ArgumentError("{context_mode} must be one of {modes}, got {mode!r}", mode=mode, modes=", ".join(MODES))
    if suffix is None:
        return
    check_suffix("context_from", suffix)
    if suffix.lower().endswith((".json", ".jsonl")):
        raise ArgumentError("{context_from} is {suffix!r}: context is read from text files only", suffix=suffix)


def read_context(item: Item, suffix: str, timeout: float) -> str:
    """Return the text of the file with this suffix beside an image; "" without one, or if the image is not on disk.

    Raises ValueError for a file that cannot be read within `timeout` seconds as text of at most `MAX_BYTES`.
    """
    if item.file is None:
        return ""
    path = item.file.with_suffix(suffix)
    try:
        text = decode_text(TimeLimit(timeout).run(partial(_read, path))).strip()
    except FileNotFoundError:
        return ""
    except TimeIsOver:
        raise ValueError(f"{path}: the context cannot be read (it takes longer than {timeout:g} s)") from None
    except OSError as error:
        raise ValueError(f"{path}: the context cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: the context cannot be read ({error})") from None
    if "\0" in text:
        raise ValueError(f"{path}: the context has a NUL character")
    return text


def _read(path: Path) -> bytes:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # reading another kind of file might block or never end
        raise OSError(errno.EINVAL, "it is a folder, a device or a pipe")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)  # `st_size` is 0 for files in procfs
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has {max(status.st_size, len(data))} bytes, more than {MAX_BYTES}")
    return data
