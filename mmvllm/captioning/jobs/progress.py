"""Counters of a running job."""

import os
import re
import time
from typing import Any

from mmvllm.captioning.json_captions import is_cut
from mmvllm.captioning.multi_prompt import entries_of
from mmvllm.captioning.outputs.record import TRUNCATED, is_clip
from mmvllm.captioning.sources.counts import Counts

_OF_THE_WALK = ("num_skipped", "num_failed_before", "num_further_clips")


class Progress:
    """The counters of a run; the job's threads write them, and any thread may read them.

    `engine_wait_share` is the share of the time since the first image was prepared in which the engine waited for
    images, in [0, 1]. `num_failed_before` counts the skipped images that an earlier run recorded as failed.

    Args:
        empty_caption: the caption that the job makes of a text without characters.
    """

    def __init__(self, empty_caption: str = ""):
        self._empty_caption = empty_caption.strip()
        self.num_captioned = self.num_duplicates = self.num_failed = self.num_skipped = 0
        self.num_failed_before = 0
        self.ignored = Counts()  # files that are neither images nor videos, by suffix
        self.reasons = Counts()  # of failures
        self.num_repetitions = 0  # captions that were ended because they repeated themselves
        self.num_empty = 0  # captions, including duplicates, for which the model wrote nothing
        self.num_truncated = 0  # captions, including duplicates, of images that lack their last rows
        self.num_tokens = 0  # of captions from the model, without copies
        self.num_cut = 0  # captions, including duplicates, whose JSON object is not complete
        self.num_clips = 0  # captioned clips, which the counts above include
        self.video_seconds = 0.0  # of these clips
        self.num_further_clips = 0  # clips that were found beyond the first of each video
        self.engine_wait_share = 0.0
        self._start = time.perf_counter()
        self._end: float | None = None

    @property
    def num_done(self) -> int:
        """Number of images and clips recorded in this run."""
        return self.num_captioned + self.num_duplicates + self.num_failed

    @property
    def unit(self) -> str:
        """The unit of the counts: "images", "clips", or "records" if there are both."""
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
        captions = (one["caption"] for one in entries_of(record) if one["caption"] is not None)
        self.num_empty += sum(caption.strip() == self._empty_caption for caption in captions)
        self.num_truncated += record["error"] is None and TRUNCATED in record
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
        """The counts of the search for images, for `take` in another process."""
        numbers = {name: getattr(self, name) for name in _OF_THE_WALK}
        return numbers | {"ignored": dict(self.ignored)}

    def take(self, ignored: dict[str, int], **numbers: int) -> None:
        """Merge the counts of a search in another process, which may arrive in any order."""
        for name in _OF_THE_WALK:
            setattr(self, name, max(getattr(self, name), numbers[name]))
        self.ignored |= ignored

    def end(self) -> None:
        self._end = time.perf_counter()


def kind_of_failure(record: dict) -> str:
    """Return the reason without parts that differ between images: caption file path, text in brackets, numbers."""
    stem = os.path.splitext(os.path.basename(record["path"]))[0]
    reason = re.sub(rf"^(.*/)?{re.escape(stem)}(\.\w+)+", "the caption file", record["error"], flags=re.DOTALL)
    return re.sub(r"\d+", "N", reason.partition(" (")[0].partition(";")[0])[:100]
