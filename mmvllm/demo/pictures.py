"""What a picture will cost, known from its header."""

import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from mmvllm.media import FORMATS, MediaPolicy
from mmvllm.processors.image import ImageProcessorConfig, pixel_bounds, smart_resize


class PictureError(ValueError):
    """What is wrong with a picture, by its name, for who added it."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture on disk, and its size in pixels."""

    path: Path
    width: int
    height: int

    @classmethod
    def read(cls, path: Path, policy: MediaPolicy) -> "Picture":
        """Read the header alone; raises PictureError if it is no picture, or too large a one."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                with Image.open(path, formats=FORMATS) as image:
                    width, height = image.size
        except Image.DecompressionBombError:
            raise PictureError(f"{path.name} has too many pixels; at most {policy.max_pixels:,} are taken") from None
        except Exception:  # on a damaged file Pillow's readers raise anything
            raise PictureError(f"{path.name} is not a picture that can be read") from None
        if (size := path.stat().st_size) > policy.max_bytes:
            raise PictureError(f"{path.name} has {size:,} bytes; at most {policy.max_bytes:,} are taken")
        if width * height > policy.max_pixels:
            raise PictureError(f"{path.name} has {width * height:,} pixels; at most {policy.max_pixels:,} are taken")
        return cls(path, width, height)

    def load(self, policy: MediaPolicy) -> Image.Image:
        """Decode it within the policy's limits; raises PictureError."""
        try:
            return policy.load(self.path.read_bytes())
        except (OSError, ValueError) as error:
            message = f"{self.path.name} cannot be read; it may be damaged: remove it, or add it again"
            raise PictureError(message) from error

    def num_tokens(self, config: ImageProcessorConfig, min_pixels: int, max_pixels: int) -> int:
        """How many tokens it will be, between these bounds; raises ValueError for bounds or shapes that cannot be."""
        low, high = pixel_bounds(min_pixels, max_pixels, config.min_pixels, config.max_pixels)
        height, width = smart_resize(self.height, self.width, config.factor, low, high)
        return height * width // config.factor**2
