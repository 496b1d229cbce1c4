"""A video as the clips that are captioned: the whole of it, or one after the other of some seconds."""

import dataclasses
import math
from collections.abc import Iterator

from mmvllm.captioning.items import Item, part_of_key
from mmvllm.captioning.loading import ItemLoader
from mmvllm.captioning.names import is_animation_name
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.errors import RequestError
from mmvllm.processors.clip import VideoInfo

MAX_CLIPS, MAX_CHARACTERS = 10_000, 2**26  # of a video; of the item's texts in the records of all its clips
SHORTEST_SHARE = 0.25  # of the seconds of a clip; a last piece that is shorter joins the clip before it


def clips_of(item: Item, settings: CaptionSettings, loader: ItemLoader) -> Iterator[Item]:
    """The clips of a video, in their order; anything else as it is.

    A video is read only where the settings need it: its header, and all of a file that has no number of frames, such as
    Matroska. Raises ValueError if it cannot be read, and for a video of too many clips.
    """
    if item.error is None and settings.animations_as_clips and _is_animation(item, loader):
        item = dataclasses.replace(item, is_video=True)
    if item.error is not None or not item.is_video or settings.clip_seconds is None:
        yield item
    else:
        yield from _cut(item, loader.info(item), settings.clip_seconds)


def _is_animation(item: Item, loader: ItemLoader) -> bool:
    if item.is_video or not is_animation_name(item.path):
        return False
    try:
        return loader.info(item).total_num_frames > 1
    except ValueError:  # as an image, it fails with the reason
        return False


def _cut(item: Item, info: VideoInfo, seconds: float) -> Iterator[Item]:
    start, end = item.start or 0.0, min(info.duration, info.duration if item.end is None else item.end)
    of_two_frames = 2 / info.fps
    seconds = max(seconds, of_two_frames)
    number, rest = divmod(end - start, seconds)
    number = int(number) + (rest >= max(seconds * SHORTEST_SHARE, of_two_frames))
    if number < 2:  # or there is nothing between `start` and `end`, which preparation refuses
        yield item
        return
    if number > MAX_CLIPS:
        limit = f"at most {MAX_CLIPS} are captioned; give more seconds for each (--clip-seconds)"
        raise RequestError(f"has {number} clips of {seconds:g} s, {limit}")
    length = sum(len(text or "") for text in (item.path, item.id, item.prompt, item.context))
    if number * length > MAX_CHARACTERS:
        raise RequestError(f"has {number} clips, each with {length} characters of path, id and prompt; shorten these")
    for i in range(number):
        first = _milliseconds(start + i * seconds)
        last = _milliseconds(end if i == number - 1 else start + (i + 1) * seconds)
        part = f"{item.part}{part_of_key(first)}" if i else item.part
        yield dataclasses.replace(item, start=first, end=last, part=part)


def _milliseconds(seconds: float) -> float:
    """Rounded down to them: a clip that begins with a frame must not begin after it."""
    return math.floor(seconds * 1000 + 1e-6) / 1000
