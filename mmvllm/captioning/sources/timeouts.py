"""How long loading an image or a video of a job may take, so that no file keeps the others waiting."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mmvllm.captioning.sources.items import Item
from mmvllm.errors import ArgumentError, RequestError
from mmvllm.processors.images.decode import Reserve
from mmvllm.utils.arguments import MAX_SECONDS, is_number
from mmvllm.utils.time_limit import TimeIsOver, TimeLimit

T = TypeVar("T")


def check_seconds(name: str, value: float) -> None:
    """Raise ArgumentError for a time limit that is no number of seconds; `name` is that of its option."""
    if not is_number(value) or not 0 < value < MAX_SECONDS:
        raise ArgumentError(
            f"{{{name}}} must be a number of seconds above 0 and below {MAX_SECONDS:,.0f}, got {value!r}"
        )


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds in which an image, or the frames of a video, must be downloaded or read, and decoded.

    The wait for memory that others are decoded in does not count.
    """

    image: float = 120.0
    video: float = 1800.0

    def __post_init__(self):
        check_seconds("image_timeout", self.image)
        check_seconds("video_timeout", self.video)

    def seconds_for(self, item: Item) -> float:
        """The limit of one item."""
        return self.video if item.is_video else self.image

    def load(self, item: Item, load: Callable[[TimeLimit], T]) -> T:
        """What `load` returns or raises; RequestError if it takes too long: its thread is then left behind."""
        limit = TimeLimit(self.seconds_for(item))
        try:
            return limit.run(partial(load, limit))
        except TimeIsOver:
            raise self.exceeded(item) from None

    def exceeded(self, item: Item) -> RequestError:
        """The error of an item that took too long."""
        kind = "video" if item.is_video else "image"
        return RequestError(
            f"took longer than {self.seconds_for(item):g} s to load; shrink or re-encode it, or raise {kind}_timeout"
        )


DEFAULT_TIMEOUTS = Timeouts()


def outside(limit: TimeLimit, reserve: Reserve) -> Reserve:
    """The function, whose wait for memory does not count; memory of what takes too long is free for others at once."""

    @contextmanager
    def reserve_outside(num_bytes: int) -> Iterator[None]:
        limit.check()  # a thread that was left behind takes none
        reserved = ExitStack()
        with limit.stopped_clock():
            reserved.enter_context(reserve(num_bytes))
        with limit.released_when_over(reserved.close):
            yield

    return reserve_outside
