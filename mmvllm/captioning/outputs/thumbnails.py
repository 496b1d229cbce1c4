"""Small WebP images for the report: thumbnails of images, and a few frames of a clip side by side."""

import base64
import io
from contextlib import suppress

from PIL import Image

from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.loading import ItemLoader
from mmvllm.captioning.sources.tars import Source
from mmvllm.models.video import VIDEO_DEFAULTS
from mmvllm.processes.pool import WorkersUnusable
from mmvllm.processors.images.draft import Draft
from mmvllm.processors.videos.clip import VideoInfo
from mmvllm.processors.videos.processor import ClipPlan, Resize, shrunk

SIDE = 160  # pixels, the longer side
NUM_FRAMES = 4  # of a clip
FRAME_SIDE = 128  # pixels, the longer side of a frame
FRAME_GAP = 2  # pixels between frames


def thumbnail(loader: ItemLoader, source: Source | None, path: str) -> str | None:
    """Return a WebP image in base64; None if the image cannot be read. `path` is its name in the record."""
    if source is None:
        return None
    with suppress(ValueError, WorkersUnusable):
        image = loader.image(Item(path, "", source), Draft(1, SIDE))
        image.thumbnail((SIDE, SIDE))
        return as_webp(image)
    return None


def as_webp(image: Image.Image) -> str:
    """Encode an image as WebP in base64."""
    image.save(buffer := io.BytesIO(), "WEBP", quality=60)
    return base64.b64encode(buffer.getvalue()).decode()


class StripPlan(ClipPlan):
    """A plan for a few small frames from `video_start` to `video_end` of its content part."""

    __slots__ = ()

    is_preview = True

    def sizes(self, num_frames: int, height: int, width: int) -> list[Resize]:
        return [shrunk(height, width, FRAME_SIDE, FRAME_SIDE)]

    def frame_indices(self, info: VideoInfo) -> list[int]:
        start, end, last = self.part["video_start"], self.part["video_end"], info.total_num_frames - 1
        start, end = start * info.fps, last if end is None else min(end * info.fps, last)
        # Frames are in the middle of equal parts, because a clip often begins and ends with a cut.
        places = (start + (end - start) * (i + 0.5) / NUM_FRAMES for i in range(NUM_FRAMES))
        return [min(int(place), last) for place in places]


def strip_of_frames(loader: ItemLoader, source: Source | None, start: float, end: float | None) -> str | None:
    """Return frames from `start` to `end` (seconds) as a WebP image in base64; None if they cannot be read."""
    if source is None:
        return None
    with suppress(ValueError, WorkersUnusable):
        video = Item("", "", source, is_video=True)
        clip = loader.clip(video, StripPlan(VIDEO_DEFAULTS, part={"video_start": start, "video_end": end}))
        _, height, width, _ = clip.frames.shape
        strip = Image.new("RGB", (len(clip.frames) * (width + FRAME_GAP) - FRAME_GAP, height), "white")
        for i, frame in enumerate(clip.frames):
            strip.paste(Image.fromarray(frame), (i * (width + FRAME_GAP), 0))
        return as_webp(strip)
    return None
