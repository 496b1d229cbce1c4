"""Requests, and images for them."""

import numpy as np
from PIL import Image


def noise_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of smooth noise, different for every seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def ask(*parts, **keys) -> dict:
    """A request with one user turn of strings and pictures, in that order."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"messages": [{"role": "user", "content": content}], **keys}
