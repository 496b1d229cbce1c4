"""Uploaded images, and their number of tokens, read from their headers."""

import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from mmvllm.errors import RequestError
from mmvllm.media import FORMATS, MediaPolicy
from mmvllm.processors.decode import readable_formats
from mmvllm.processors.image import ImageProcessorConfig
from mmvllm.processors.load_video import Load


class UploadError(RequestError):
    """An uploaded file that cannot be used; `reason` names it and is shown to the visitor."""


def check_bytes(path: Path, limit: int) -> None:
    """Raise UploadError for a file that is too large."""
    if (size := path.stat().st_size) > limit:
        raise UploadError(f"{path.name} has {size:,} bytes; at most {limit:,} are accepted")


def damaged(path: Path) -> UploadError:
    """The error for a file that cannot be decoded."""
    return UploadError(f"{path.name} cannot be read; it may be damaged: remove it, or add it again")


@dataclass(frozen=True, slots=True)
class UploadedImage:
    """An encoded image file and its size in pixels."""

    path: Path
    width: int
    height: int

    @classmethod
    def read(cls, path: Path, policy: MediaPolicy) -> "UploadedImage":
        """Read the header only; raises UploadError if the file is not an image or exceeds the limits."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                with Image.open(path, formats=readable_formats(FORMATS)) as image:
                    width, height = image.size
        except Image.DecompressionBombError:
            raise UploadError(f"{path.name} has too many pixels; at most {policy.max_pixels:,} are accepted") from None
        except Exception:  # Pillow's readers raise any exception for a damaged file
            raise UploadError(f"{path.name} is not a picture that can be read") from None
        check_bytes(path, policy.max_bytes)
        if width * height > policy.max_pixels:
            raise UploadError(f"{path.name} has {width * height:,} pixels; at most {policy.max_pixels:,} are accepted")
        return cls(path, width, height)

    def load(self, decode: Load) -> Image.Image:
        """Decode the image; raises UploadError."""
        try:
            return decode.image(self.path.read_bytes())
        except (OSError, ValueError):
            raise damaged(self.path) from None

    def num_tokens(self, config: ImageProcessorConfig, min_pixels: int, max_pixels: int) -> int:
        """The number of tokens with these pixel bounds; raises ValueError for invalid bounds or shapes."""
        height, width = config.resized(self.height, self.width, min_pixels, max_pixels)
        return height * width // config.factor**2
