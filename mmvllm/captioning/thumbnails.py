"""A small WebP image of an image, for the report."""

import base64
import io
from contextlib import suppress

from PIL import Image

from mmvllm.captioning.items import Item
from mmvllm.captioning.loading import ItemLoader
from mmvllm.captioning.tars import Source
from mmvllm.processes.pool import WorkersUnusable
from mmvllm.processors.draft import Draft

SIDE = 160  # pixels, the longer side


def thumbnail(loader: ItemLoader, source: Source | None, path: str) -> str | None:
    """A WebP image in base64; None if the image cannot be read. `path` is its name in the record."""
    if source is None:
        return None
    with suppress(ValueError, WorkersUnusable):
        image = loader.image(Item(path, "", source), Draft(1, SIDE))
        image.thumbnail((SIDE, SIDE))
        return encoded(image)
    return None


def encoded(image: Image.Image) -> str:
    """A WebP image in base64."""
    image.save(buffer := io.BytesIO(), "WEBP", quality=60)
    return base64.b64encode(buffer.getvalue()).decode()
