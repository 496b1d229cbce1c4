"""Uploaded images and their token counts."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from PIL import Image

from mmvllm.errors import MediaFileError, RequestError
from mmvllm.media.policy import MediaError
from mmvllm.processes.pool import WorkersUnusable
from mmvllm.processors.images.draft import Draft, source_size
from mmvllm.processors.images.processor import ImageProcessorConfig
from mmvllm.processors.videos.load import Load

SMALLEST = Draft(max_pixels=1, min_side=1)
T = TypeVar("T")


class UploadError(RequestError):
    """Raised for an uploaded file that cannot be used; `reason` names the file and is shown to the visitor."""


def decoded(path: Path, decode: Callable[[bytes], T]) -> T:
    """Apply `decode` to the content of a file; raises UploadError if it cannot be read or decoded."""
    try:
        data = path.read_bytes()
    except OSError:
        raise UploadError(f"{path.name} cannot be read; remove it, or add it again") from None
    try:
        return decode(data)
    except (MediaError, MediaFileError) as error:
        raise UploadError(f"{path.name}: {error.reason}") from None
    except WorkersUnusable:  # for example, because the server is shutting down
        raise UploadError(f"{path.name} cannot be looked at now; try again later") from None


@dataclass(frozen=True, slots=True)
class UploadedImage:
    """An encoded image file and its size in pixels."""

    path: Path
    width: int
    height: int

    @classmethod
    def read(cls, path: Path, decode: Load) -> "UploadedImage":
        """Check an image by decoding it, a JPEG at its smallest scale; raises UploadError if it cannot be used."""
        with closing(decoded(path, lambda data: decode.image(data, SMALLEST))) as image:
            return cls(path, *source_size(image))

    def load(self, decode: Load) -> Image.Image:
        """Decode the image; raises UploadError."""
        return decoded(self.path, decode.image)

    def num_tokens(self, config: ImageProcessorConfig, min_pixels: int, max_pixels: int) -> int:
        """Return the number of tokens with these pixel bounds; raises ValueError for invalid bounds or shapes."""
        height, width = config.resized(self.height, self.width, min_pixels, max_pixels)
        return height * width // config.factor**2
