"""File suffixes of images and videos, and relative paths for caption files below an output folder."""

import os
import re
from pathlib import PurePath

# Common image formats that Pillow reads. AVIF needs Pillow 11.3; HEIC, HEIF and JPEG XL need the extras `heif` and
# `jxl`, which the error of such an image names if they are missing.
_FORMATS = (
    "apng avif bmp dib gif heic heif hif j2k jfif jp2 jpe jpeg jpg jxl mpo pbm pgm png pnm ppm qoi tga tif tiff webp"
)
SUFFIXES = frozenset(f".{name}" for name in _FORMATS.split())
# Pillow's names of these formats.
FORMATS = ("AVIF", "BMP", "DIB", "GIF", "HEIF", "JPEG", "JPEG2000", "JXL", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")
_VIDEO_FORMATS = "3gp avi flv m2ts m4v mkv mov mp4 mpeg mpg ogv webm wmv"
VIDEO_SUFFIXES = frozenset(f".{name}" for name in _VIDEO_FORMATS.split())
ANIMATION_SUFFIXES = frozenset((".apng", ".avif", ".gif", ".tif", ".tiff", ".webp"))  # may have several frames
# Folders that NAS systems, Windows, macOS and Linux make for thumbnails, deleted files, snapshots and metadata.
_SYSTEM_FOLDERS = (
    *("@eadir", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "~snapshot", "network trash folder"),
    *("$recycle.bin", "system volume information", "__macosx", "lost+found"),
)
MAX_PATH = 4096  # characters; a longer text is not a path on any system
_SHORT_SUFFIX = re.compile(r"\.\w{1,10}")
URL = re.compile(r"https?://(?:[^/?#]*@)?(\[[^]/?#]*\]|[^/?#:]*)[^/?#]*([^?#]*)", re.IGNORECASE)  # host, path


def is_hidden_name(name: str) -> bool:
    """Return whether a file or folder is not the user's own: its name has a dot before it, or a system made it."""
    return (name.startswith(".") and name not in (".", "..")) or name.lower() in _SYSTEM_FOLDERS


def is_media_name(name: str) -> bool:
    """Return whether a file with this name is treated as an image or a video."""
    return _suffix(name) in SUFFIXES or is_video_name(name)


def is_video_name(name: str) -> bool:
    """Return whether this file name, URL or data URI is treated as a video."""
    if name[:5].lower() == "data:":
        return name[5:11].lower() == "video/"
    return _suffix(_path_of(name)) in VIDEO_SUFFIXES


def is_animation_name(name: str) -> bool:
    """Return whether an image with this name may have several frames."""
    return _suffix(_path_of(name)) in ANIMATION_SUFFIXES


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _path_of(name: str) -> str:
    match = URL.match(name)
    return match[2] if match else name


def kind_of_file(name: str) -> str:
    """Return the name under which a file that is neither image nor video is counted: its suffix, if that is short."""
    suffix = _suffix(name)
    if not suffix:
        return "without a suffix"
    return suffix if _SHORT_SUFFIX.fullmatch(suffix) else "with other suffixes"


def relative_path(*paths: str) -> str:
    """Join paths without roots, '..' and NUL, so that the result stays inside a folder."""
    pures = [PurePath(path.replace("\0", "")) for path in paths]
    names = [name for pure in pures for name in pure.parts[bool(pure.anchor) :] if name != ".."]
    return "/".join(names) or "index"


def relative_of_url(url: str) -> str:
    host, path = URL.match(url).groups()
    return relative_path(host, path.strip("/") or "index")


def folder_name(path: str) -> str:
    name = PurePath(path).name
    return name if name not in ("", "..") else os.path.basename(os.path.realpath(path))
