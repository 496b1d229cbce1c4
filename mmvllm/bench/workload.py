"""Reproducible requests: distinct images of smooth noise, each with a line of text."""

import io
import re
from itertools import count

import numpy as np
from PIL import Image

MIXED_SIZES = [(448, 448), (640, 480), (480, 640), (1024, 768), (336, 336), (1280, 720), (720, 1280), (960, 320)]
WORDS = """
a and are as at big blue box but by cat day do dog end far for from go good green has he in is it light line man
new no not now of off on one out over red say sea see she so some sun that the they this time to tree two up was
way we what with you
"""


def image_sizes(text: str) -> list[tuple[int, int]]:
    """Parse "448x448", a comma-separated list, or "mixed" to (width, height) pairs; raise ValueError otherwise."""
    if text == "mixed":
        return MIXED_SIZES
    matches = [re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", size.strip()) for size in text.split(",")]
    if not all(matches):
        raise ValueError(f"{text!r} is not an image size; give width and height in pixels as in 448x448, or mixed")
    return [(int(match[1]), int(match[2])) for match in matches]


def smooth_noise(width: int, height: int, seed: list[int]) -> Image.Image:
    """Return an image that is different for every seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, image_format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format=image_format, quality=90)  # PNG ignores the quality
    return file.getvalue()


class Workload:
    """An infinite sequence of requests, determined by the arguments."""

    def __init__(
        self, tokenizer, *, sizes: list[tuple[int, int]], prompt_tokens: int, text_share: float = 0.0, seed: int = 0
    ):
        """`sizes` are used in turn; a share `text_share` of the requests, evenly spread, has no image."""
        self.sizes, self.prompt_tokens, self.text_share, self.seed = sizes, prompt_tokens, text_share, seed
        self._word_tokens = {word: len(tokenizer(f" {word}")["input_ids"]) for word in WORDS.split()}
        self._numbers = count()

    def requests(self, number: int) -> list[dict]:
        """Return the next requests; images are JPEG files in memory."""
        return [self._request(next(self._numbers)) for _ in range(number)]

    def _request(self, i: int) -> dict:
        content = [{"type": "text", "text": self._text(i)}]
        texts_before = int(i * self.text_share)
        if int((i + 1) * self.text_share) == texts_before:
            image = smooth_noise(*self.sizes[(i - texts_before) % len(self.sizes)], seed=[self.seed, i])
            content.insert(0, {"type": "image", "image": encoded(image, "jpeg")})
        return {"messages": [{"role": "user", "content": content}]}

    def _text(self, i: int) -> str:
        """Return words of `prompt_tokens` tokens in total, or a few more if the last word has several."""
        rng = np.random.default_rng([self.seed, i, 1])
        text, num_tokens = "", 0
        while num_tokens < self.prompt_tokens:
            word = str(rng.choice(list(self._word_tokens)))
            text, num_tokens = f"{text} {word}", num_tokens + self._word_tokens[word]
        return text
