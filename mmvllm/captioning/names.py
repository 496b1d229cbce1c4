"""File suffixes of images, and relative paths for caption files below an output folder."""

import os
import re
from pathlib import PurePath

# Common image formats that Pillow reads; AVIF since Pillow 11.3, HEIC and HEIF with the extra `heif`, which a failed
# image names where it is missing.
_FORMATS = "apng avif bmp dib gif heic heif hif j2k jfif jp2 jpe jpeg jpg mpo pbm pgm png pnm ppm qoi tga tif tiff webp"
SUFFIXES = frozenset(f".{name}" for name in _FORMATS.split())
URL = re.compile(r"https?://(?:[^/?#]*@)?(\[[^]/?#]*\]|[^/?#:]*)[^/?#]*([^?#]*)", re.IGNORECASE)  # host, path


def is_image_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def relative_path(*paths: str) -> str:
    """The paths joined, without roots, '..' and NUL, so that the result stays inside a folder."""
    pures = [PurePath(path.replace("\0", "")) for path in paths]
    names = [name for pure in pures for name in pure.parts[bool(pure.anchor) :] if name != ".."]
    return "/".join(names) or "index"


def relative_of_url(url: str) -> str:
    host, path = URL.match(url).groups()
    return relative_path(host, path.strip("/") or "index")


def folder_name(path: str) -> str:
    name = PurePath(path).name
    return name if name not in ("", "..") else os.path.basename(os.path.realpath(path))
