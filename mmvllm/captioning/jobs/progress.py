"""Counters of a running job."""

import os
import re
import time
from typing import Any

from mmvllm.captioning.json_captions import is_cut
from mmvllm.captioning.multi_prompt import entries_of
from mmvllm.captioning.outputs.record import is_clip
from mmvllm.captioning.sources.counts import Counts

_OF_THE_WALK = ("num_skipped", "num_failed_before", "num_further_clips")


class Progress:
    """Counters that the job's threads write and any thread may read.

    `engine_wait_share` is the share of the time since the first image was prepared in which the engine had no image to
    work on, in [0, 1]. `num_failed_before`, those that an earlier run recorded as failed, is a part of `num_skipped`.
    """

    def __init__(self):
        self.num_captioned = self.num_duplicates = self.num_failed = self.num_skipped = 0
        self.num_failed_before = 0
        self.ignored = Counts()  # files that are neither images nor videos, by suffix
        self.reasons = Counts()  # of the failures
        self.num_repetitions = 0  # captions that were ended because they repeated themselves
        self.num_tokens = 0  # of captions that the model wrote
        self.num_cut = 0  # captions, including duplicates, whose JSON object is not complete
        self.num_clips = 0  # with a caption; a part of the above
        self.video_seconds = 0.0  # of these clips
        self.num_further_clips = 0  # that were found, beyond one for each video
        self.engine_wait_share = 0.0
        self._start = time.perf_counter()
        self._end: float | None = None

    @property
    def num_done(self) -> int:
        """Number of images and clips recorded in this run."""
        return self.num_captioned + self.num_duplicates + self.num_failed

    @property
    def unit(self) -> str:
        """What is counted: "images", "clips", or "records" where there are both."""
        if not self.num_clips:
            return "images"
        return "clips" if self.num_clips == self.num_captioned + self.num_duplicates else "records"

    @property
    def images_per_second(self) -> float:
        """Captions, including duplicates, per second since the start of the run."""
        return (self.num_captioned + self.num_duplicates) / self.seconds

    @property
    def seconds(self) -> float:
        """Time since the start of the run, or its duration once it has ended."""
        return (self._end or time.perf_counter()) - self._start

    def add(self, record: dict) -> None:
        self.num_cut += sum(map(is_cut, entries_of(record)))
        if is_clip(record) and record["error"] is None:
            self.num_clips += 1
            self.video_seconds += record["end"] - record["start"]
        if record["error"] is not None:
            self.num_failed += 1
            self.reasons.add(kind_of_failure(record))
        elif record["duplicate_of"] is not None:
            self.num_duplicates += 1
        else:
            self.num_captioned += 1
            self.num_tokens += record["completion_tokens"]
            self.num_repetitions += sum(one["finish_reason"] == "repetition" for one in entries_of(record))

    def skip(self, has_failed: bool) -> None:
        self.num_skipped += 1
        self.num_failed_before += has_failed

    @property
    def of_the_walk(self) -> dict[str, Any]:
        """What the search for images has counted, for `take` in another process."""
        numbers = {name: getattr(self, name) for name in _OF_THE_WALK}
        return numbers | {"ignored": dict(self.ignored)}

    def take(self, ignored: dict[str, int], **numbers: int) -> None:
        """Take the counts of a search in another process, which may arrive in any order."""
        for name in _OF_THE_WALK:
            setattr(self, name, max(getattr(self, name), numbers[name]))
        self.ignored |= ignored

    def end(self) -> None:
        self._end = time.perf_counter()


def kind_of_failure(record: dict) -> str:
    """The reason without what differs from image to image: its caption file's path, details in brackets, numbers."""
    stem = os.path.splitext(os.path.basename(record["path"]))[0]
    reason = re.sub(rf"^(.*/)?{re.escape(stem)}(\.\w+)+", "the caption file", record["error"], flags=re.DOTALL)
    return re.sub(r"\d+", "N", reason.partition(" (")[0].partition(";")[0])[:100]
