"""The tasks of a run: the selected images, and clips of videos, that are not recorded yet."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike

import xxhash

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.jobs.captioner import Task, reason_of
from mmvllm.captioning.jobs.progress import Progress
from mmvllm.captioning.outputs.index import Index
from mmvllm.captioning.outputs.output import Output
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.captioning.sources.context import read_context
from mmvllm.captioning.sources.counts import Counts
from mmvllm.captioning.sources.find import find_items
from mmvllm.captioning.sources.items import Item, real_folder
from mmvllm.captioning.sources.loading import ItemLoader
from mmvllm.captioning.sources.names import SUFFIXES, VIDEO_SUFFIXES, is_animation_name
from mmvllm.errors import RequestError
from mmvllm.processes.pool import WorkersUnusable
from mmvllm.processors.videos.clip import VideoInfo

MAX_CLIPS, MAX_CLIP_CHARACTERS = 10_000, 2**26  # per video; the characters are of its texts in all records
SHORTEST_CLIP_SHARE = 0.25  # of the seconds of a clip; a shorter last piece joins the clip before it


@dataclass(frozen=True, slots=True)
class Selection:
    """The images that a run selects; see `caption_images` for the arguments."""

    paths: list[str | PathLike]
    retry_failed: bool = False
    limit: int | None = None
    shard: tuple[int, int] | None = None

    def __post_init__(self):
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise ValueError(f"shard must be I/N with 1 <= I <= N, got {self.shard[0]}/{self.shard[1]}")

    def items(self, ignored: Counts | None = None) -> Iterator[Item]:
        """Find images and videos of this shard, in the order of `find_items`; raises ValueError if there are none."""
        num_found = 0
        for item in find_items(self.paths, ignored):
            num_found += 1
            if self.shard is None or shard_of(item.path, self.shard[1]) == self.shard[0]:
                yield item
        if not num_found:
            names = ", ".join(map(str, self.paths))
            suffixes, videos = (", ".join(sorted(group)) for group in (SUFFIXES, VIDEO_SUFFIXES))
            raise ValueError(f"{names} has no images ({suffixes}) or videos ({videos})")


def shard_of(path: str, num_shards: int) -> int:
    """Return the shard of an item, from 1 to `num_shards`, which depends only on the path."""
    return 1 + xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogatepass")) % num_shards


class PendingTasks:
    """An iterable of a run's tasks, in the order in which their images are found; each task is yielded once."""

    def __init__(
        self,
        settings: CaptionSettings,
        selection: Selection,
        output: Output,
        progress: Progress,
        loader: ItemLoader,
    ):
        self.settings, self.selection, self._loader = settings, selection, loader
        self._output, self.progress = output, progress
        real_folder.cache_clear()  # links may have changed since the last run
        self.in_flight: dict[str, str] = {}  # key -> path of the tasks that have no record yet

    @property
    def index(self) -> Index:
        return self._output.index

    def __iter__(self) -> Iterator[Task]:
        num_tasks = 0
        for item in self.selection.items(self.progress.ignored):
            for clip in self._clips(item):
                task = self.admit(clip)
                if task is not None:
                    yield self._with_context(task)
                    num_tasks += 1
                if num_tasks == self.selection.limit:
                    return

    def _clips(self, item: Item) -> Iterator[Item]:
        """Yield the clips of a video, or one item with an error if its header cannot be read, or an image unchanged."""
        has_failed = None
        try:
            for clip in clips_of(item, self.settings, self._loader):
                if has_failed is None:
                    has_failed = self.index.has_failed(self.settings.key(clip))
                else:
                    self.progress.num_further_clips += 1
                    clip = dataclasses.replace(clip, joins_retry=has_failed)
                yield clip
        except ValueError as error:
            yield dataclasses.replace(item, error=reason_of(item, error))
        except WorkersUnusable as error:
            raise JobError(f"{error}; videos need them") from error

    def _with_context(self, task: Task) -> Task:
        """Return the task with the text beside its image, or with an error if the text cannot be read."""
        item, suffix = task.item, self.settings.context_from
        if suffix is None or item.error is not None or item.context is not None:
            return task
        try:
            beside = read_context(item, suffix, self._loader.timeouts.seconds_for(item))
            return dataclasses.replace(task, item=dataclasses.replace(item, beside=beside))
        except ValueError as error:
            return _failed(item, task.key, error)

    def admit(self, item: Item) -> Task | None:
        """Return the task for an item; None if it is recorded, in flight, or skipped for its existing caption file."""
        key, has_source = self.settings.key(item), item.source is not None
        if self._output.skips(item) or not self._claim(item, key):
            self._output.found(item, key)
            self.progress.skip(self.index.has_failed(key))
            return None
        self.in_flight[key] = item.path
        try:
            return Task(item, key, self._output.claim_file(item, key), has_source)
        except ValueError as error:
            return _failed(item, key, error)

    def restore(self, item: Item) -> None:
        """Restore the missing caption file of an image that an earlier run has recorded."""
        self._output.found(item, self.settings.key(item))

    def _claim(self, item: Item, key: str) -> bool:
        is_retry = self.selection.retry_failed and item.source is not None
        return self.index.claim(key, is_retry) or (item.joins_retry and self.index.claim(key))


def _failed(item: Item, key: str, error: ValueError) -> Task:
    return Task(dataclasses.replace(item, source=None, error=str(error)), key)


def clips_of(item: Item, settings: CaptionSettings, loader: ItemLoader) -> Iterator[Item]:
    """Yield the clips of a video in order, or any other item unchanged.

    A video is read only if the settings require it: its header, or the whole file if that has no number of frames, as
    in Matroska. Raises ValueError if the video cannot be read or has too many clips.
    """
    if item.error is None and settings.animations_as_clips and _is_animation(item, loader):
        item = dataclasses.replace(item, is_video=True)
    if item.error is not None or not item.is_video or settings.clip_seconds is None:
        yield item
    else:
        yield from _clips_in(item, loader.info(item), settings.clip_seconds)


def _is_animation(item: Item, loader: ItemLoader) -> bool:
    if item.is_video or not is_animation_name(item.path):
        return False
    try:
        return loader.info(item).total_num_frames > 1
    except ValueError:  # loading it as an image reports the reason
        return False


def _clips_in(item: Item, info: VideoInfo, seconds: float) -> Iterator[Item]:
    start, end = item.start or 0.0, min(info.duration, info.duration if item.end is None else item.end)
    of_two_frames = 2 / info.fps
    seconds = max(seconds, of_two_frames)
    number, rest = divmod(end - start, seconds)
    number = int(number) + (rest >= max(seconds * SHORTEST_CLIP_SHARE, of_two_frames))
    if number < 2:  # or nothing is between `start` and `end`, which preparation refuses
        yield item
        return
    if number > MAX_CLIPS:
        limit = f"at most {MAX_CLIPS} are captioned; give more seconds for each (--clip-seconds)"
        raise RequestError(f"has {number} clips of {seconds:g} s, {limit}")
    length = sum(len(text or "") for text in (item.path, item.id, item.prompt, item.context))
    if number * length > MAX_CLIP_CHARACTERS:
        raise RequestError(f"has {number} clips, each with {length} characters of path, id and prompt; shorten these")
    for i in range(number):
        first = _milliseconds(start + i * seconds)
        last = _milliseconds(end if i == number - 1 else start + (i + 1) * seconds)
        part = f"{item.part}@{first:.3f}" if i else item.part
        yield dataclasses.replace(item, start=first, end=last, part=part)


def _milliseconds(seconds: float) -> float:
    """Round down to milliseconds: a clip that begins with a frame must not begin after it."""
    return math.floor(seconds * 1000 + 1e-6) / 1000
