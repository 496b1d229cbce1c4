"""Time limits for loading images and videos, so that no file keeps the others waiting."""

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
    """Raise ArgumentError if `value`, the time limit of the option `name`, is not a valid number of seconds."""
    if not is_number(value) or not 0 < value < MAX_SECONDS:
        raise ArgumentError(
            f"{{{name}}} must be a number of seconds above 0 and below {MAX_SECONDS:,.0f}, got {value!r}"
        )


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds allowed for reading (or downloading) and decoding an image, or the frames of a video.

    Waiting for decoding memory that other items hold does not count.
    """

    image: float = 120.0
    video: float = 1800.0

    def __post_init__(self):
        check_seconds("image_timeout", self.image)
        check_seconds("video_timeout", self.video)

    def seconds_for(self, item: Item) -> float:
        """Return the limit for an item."""
        return self.video if item.is_video else self.image

    def load(self, item: Item, load: Callable[[TimeLimit], T]) -> T:
        """Return the result of `load`, called in a thread; if it takes too long, abandon it and raise RequestError."""
        limit = TimeLimit(self.seconds_for(item))
        try:
            return limit.run(partial(load, limit))
        except TimeIsOver:
            raise self.exceeded(item) from None

    def exceeded(self, item: Item) -> RequestError:
        """Return the error for an item that took too long."""
        kind = "video" if item.is_video else "image"
        return RequestError(
            f"took longer than {self.seconds_for(item):g} s to load; shrink or re-encode it, or raise {kind}_timeout"
        )


DEFAULT_TIMEOUTS = Timeouts()


def outside(limit: TimeLimit, reserve: Reserve) -> Reserve:
    """Wrap `reserve` to stop the clock while it waits for memory, and to free that memory when the time is over."""

    @contextmanager
    def reserve_outside(num_bytes: int) -> Iterator[None]:
        limit.check()  # an abandoned thread must not reserve memory
        reserved = ExitStack()
        with limit.stopped_clock():
            reserved.enter_context(reserve(num_bytes))
        with limit.released_when_over(reserved.close):
            yield

    return reserve_outside
