"""Requests with random images and clips, and parts of prepared prompts."""

import numpy as np
from PIL import Image

from mmvllm.inputs import EngineInput, Grid, PlaceholderRange
from tests.helpers.media.videos import moving


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of smooth noise, different for every seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def frames(number: int, width: int, height: int, seed: int = 0) -> list[Image.Image]:
    """The frames of a clip, no two of them equal."""
    return [Image.fromarray(frame) for frame in moving(number, height, width, seed)]


def ask(*parts, **keys) -> dict:
    """A request with one user turn of the given strings, images, clips as lists of frames, and other parts."""
    return {"messages": [{"role": "user", "content": [_part(part) for part in parts]}], **keys}


def _part(part) -> dict:
    if isinstance(part, dict):
        return part
    kind = "text" if isinstance(part, str) else "video" if isinstance(part, list) else "image"
    return {"type": kind, kind: part}


def user(*content) -> dict:
    """A request with one user turn of the given content parts."""
    return {"messages": [{"role": "user", "content": list(content)}]}


def text(string: str) -> dict:
    """A content part of text."""
    return {"type": "text", "text": string}


def ranges_of(prompt: EngineInput) -> list[PlaceholderRange]:
    """(offset, length) of each run of placeholder tokens."""
    return [item.placeholder for item in prompt.mm_items]


def grids_of(prompt: EngineInput) -> list[Grid]:
    return [item.grid for item in prompt.mm_items]


def patches_of(prompt: EngineInput) -> list:
    return [item.patches for item in prompt.mm_items]


def digests_of(prompt: EngineInput) -> list[bytes]:
    return [item.digest for item in prompt.mm_items]
