"""What a run has to do: the images that it selects, without those that are recorded already."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike

import xxhash

from mmvllm.captioning.captioner import Task
from mmvllm.captioning.context import read_context
from mmvllm.captioning.counts import Counts
from mmvllm.captioning.find import find_items
from mmvllm.captioning.index import Index
from mmvllm.captioning.items import Item
from mmvllm.captioning.names import SUFFIXES
from mmvllm.captioning.output import Output
from mmvllm.captioning.progress import Progress
from mmvllm.captioning.settings import CaptionSettings


@dataclass(frozen=True, slots=True)
class Selection:
    """Which images a run takes; the arguments are those of `caption_images`."""

    paths: list[str | PathLike]
    retry_failed: bool = False
    limit: int | None = None
    shard: tuple[int, int] | None = None

    def __post_init__(self):
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}, must be at least 1")
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise ValueError(f"shard is {self.shard[0]}/{self.shard[1]}, must be I/N with 1 <= I <= N")

    def items(self, passed_over: Counts | None = None) -> Iterator[Item]:
        """Find the images of this shard, in the order of `find_items`. Raises ValueError if no path has an image."""
        num_found = 0
        for item in find_items(self.paths, passed_over):
            num_found += 1
            if self.shard is None or shard_of(item.path, self.shard[1]) == self.shard[0]:
                yield item
        if not num_found:
            names = ", ".join(map(str, self.paths))
            raise ValueError(f"{names} has no images ({', '.join(sorted(SUFFIXES))})")


def shard_of(path: str, num_shards: int) -> int:
    """The shard that an item belongs to, from 1 to `num_shards`; it depends on the path alone."""
    return 1 + xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogatepass")) % num_shards


class Worklist:
    """The tasks of a run, in the order in which their images are found; each task is yielded once."""

    def __init__(self, settings: CaptionSettings, selection: Selection, output: Output, progress: Progress):
        self.settings, self.selection = settings, selection
        self._output, self.progress = output, progress
        self.in_flight: dict[str, str] = {}  # key -> path of the tasks that have no record yet

    @property
    def index(self) -> Index:
        return self._output.index

    def __iter__(self) -> Iterator[Task]:
        num_tasks = 0
        for item in self.selection.items(self.progress.passed_over):
            task = self.admit(item)
            if task is not None:
                yield self._with_context(task)
                num_tasks += 1
            if num_tasks == self.selection.limit:
                return

    def _with_context(self, task: Task) -> Task:
        """The task with the text beside its image, or with an error if that cannot be read."""
        item, suffix = task.item, self.settings.context_from
        if suffix is None or item.error is not None or item.context is not None:
            return task
        try:
            return dataclasses.replace(task, item=dataclasses.replace(item, beside=read_context(item, suffix)))
        except ValueError as error:
            return _failed(item, task.key, error)

    def admit(self, item: Item) -> Task | None:
        """The task for an item; None if it is recorded, in flight, or skipped because its caption file exists."""
        key, is_image = self.settings.key(item), item.error is None
        if self._output.skips(item) or not self.index.claim(key, self.selection.retry_failed and is_image):
            self.progress.skip(self.index.has_failed(key))
            return None
        self.in_flight[key] = item.path
        try:
            return Task(item, key, self._output.claim_file(item), is_image)
        except ValueError as error:
            return _failed(item, key, error)


def _failed(item: Item, key: str, error: ValueError) -> Task:
    return Task(dataclasses.replace(item, source=None, error=str(error)), key)
