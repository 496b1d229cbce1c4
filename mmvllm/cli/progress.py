"""The progress display of `mmvllm caption`: a bar, log lines, or nothing."""

import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from tqdm import tqdm

from mmvllm.captioning.jobs.progress import Progress
from mmvllm.utils.text import counted

if TYPE_CHECKING:
    from mmvllm.captioning.run import CaptionRun

MODES = ("auto", "bar", "log", "none")
BAR_SECONDS, LOG_SECONDS = 0.25, 10.0


class Display:
    """Shows a job's counters from a thread, until the end of the `with` statement.

    A second thread counts the images and videos. The total is shown when it has finished, and grows if a video has
    several clips.
    """

    def __init__(self, mode: str, job: "CaptionRun"):
        self._mode = ("bar" if sys.stderr.isatty() else "log") if mode == "auto" else mode
        self._job, self._progress = job, job.progress
        self._found: int | None = None
        self._ended = threading.Event()
        self._bar = None

    def __enter__(self) -> "Display":
        if self._mode != "none":
            if self._mode == "bar":
                layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
                self._bar = tqdm(total=0, dynamic_ncols=True, bar_format=layout, file=sys.stderr)
            self._thread = threading.Thread(target=self._show, name="mmvllm-progress")
            self._thread.start()
            threading.Thread(target=self._find_total, name="mmvllm-count", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._mode != "none":
            self._thread.join()
        if self._bar is not None:
            self._refresh_bar()
            self._bar.close()

    def _find_total(self) -> None:
        with suppress(OSError, ValueError):  # the job itself reports them
            self._found = self._job.count()

    @property
    def _total(self) -> int | None:
        limit = None if self._job.limit is None else self._job.limit + self._progress.num_skipped
        found = None if self._found is None else self._found + self._progress.num_further_clips
        return min((number for number in (found, limit) if number is not None), default=None)

    def _show(self) -> None:
        while not self._ended.wait(BAR_SECONDS if self._bar is not None else LOG_SECONDS):
            if self._bar is not None:
                self._refresh_bar()
            else:
                total = "" if self._total is None else f"/{self._total}"
                tqdm.write(f"{_handled(self._progress)}{total} {self._progress.unit}, {self._text()}", file=sys.stderr)

    def _refresh_bar(self) -> None:
        self._bar.n, self._bar.total = _handled(self._progress), self._total or 0
        self._bar.set_postfix_str(self._text(), refresh=True)

    def _text(self) -> str:
        p = self._progress
        parts = [f"{p.images_per_second:.2f} {p.unit}/s"]
        if p.num_clips:
            parts.append(f"{counted(p.num_clips, 'clip')}, {p.video_seconds:,.0f} s of video")
        counts = {"failed": p.num_failed, "duplicates": p.num_duplicates, "skipped": p.num_skipped}
        parts += [f"{number} {name}" for name, number in counts.items() if number]
        parts.append(f"engine waits {p.engine_wait_share:.0%}")
        if self._total is not None and p.num_done:
            left = max(0, self._total - _handled(p)) * p.seconds / p.num_done
            parts.append(f"{tqdm.format_interval(left)} left")
        return ", ".join(parts)


def _handled(progress: Progress) -> int:
    return progress.num_done + progress.num_skipped
