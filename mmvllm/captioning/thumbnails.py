"""A small WebP image of an image, for the report."""

import base64
import io

from PIL import Image

from mmvllm.captioning.tars import TarMember
from mmvllm.processors.draft import Draft
from mmvllm.processors.load import load_image

SIDE = 160  # pixels, the longer side

Source = str | TarMember


def thumbnail(source: Source | None) -> str | None:
    """A WebP image in base64; None if the image cannot be read."""
    if source is None:
        return None
    try:
        data = source.read() if isinstance(source, TarMember) else source
        image = load_image(data, draft=Draft(1, SIDE))
    except ValueError:
        return None
    image.thumbnail((SIDE, SIDE))
    return encoded(image)


def encoded(image: Image.Image) -> str:
    """A WebP image in base64."""
    image.save(buffer := io.BytesIO(), "WEBP", quality=60)
    return base64.b64encode(buffer.getvalue()).decode()
