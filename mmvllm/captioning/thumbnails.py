"""A small WebP image of an image, for the report."""

import base64
import io
from pathlib import Path

from PIL import Image

from mmvllm.captioning.tars import TarMember
from mmvllm.processors.draft import Draft
from mmvllm.processors.load import load_image

SIDE = 160  # pixels, the longer side

Source = str | Path | TarMember


def thumbnail(source: Source | None) -> str | None:
    """A WebP image in base64; None if the image cannot be read."""
    if source is None:
        return None
    try:
        image = load_image(read(source), draft=Draft(1, SIDE))
    except ValueError:
        return None
    image.thumbnail((SIDE, SIDE))
    return encoded(image)


def read(source: Source) -> str | Path | bytes:
    """What `load_image` and `load_video` take."""
    return source.read() if isinstance(source, TarMember) else source


def encoded(image: Image.Image) -> str:
    """A WebP image in base64."""
    image.save(buffer := io.BytesIO(), "WEBP", quality=60)
    return base64.b64encode(buffer.getvalue()).decode()
