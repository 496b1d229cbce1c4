"""The output of `mmvllm caption`: captions and failures while it runs, and a final summary, also of the report."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, TextIO

from mmvllm.captioning.multi_prompt import shown_captions
from mmvllm.processors.download import without_login
from mmvllm.utils.text import printable

if TYPE_CHECKING:
    from mmvllm.captioning.jobs.progress import Progress
    from mmvllm.captioning.run import CaptionRun

MAX_NAMES_IN_ROW = 10  # names in a row of counts
MAX_FAILURES = 10  # printed while captions are recorded


def summarize(job: "CaptionRun") -> dict[str, str]:
    """Return the rows of the summary, by label."""
    p, again = job.progress, _again(job)
    failed_before = job.num_failed - p.num_failed
    rows = {
        "captioned": f"{p.num_captioned:,}",
        "clips": f"{p.num_clips:,} with a caption, {p.video_seconds:,.1f} s of video",
        "duplicates": f"{p.num_duplicates:,} (caption copied from an equal {_noun(p)})",
        "cut short": f"{p.num_cut:,} (no object; a larger --max-tokens lets them be completed)",
        "truncated": f"{p.num_truncated:,} (the last rows of the image are missing, and gray)",
        "empty": f"{p.num_empty:,} (the model wrote nothing)",
        "failed": f"{p.num_failed:,}{again}",
        "failed before": f"{failed_before:,} (recorded by an earlier run){again}",
        "skipped": f"{p.num_skipped - p.num_failed_before:,} {_skipped(job)}",
    }
    rows |= {"repetitions": f"{p.num_repetitions:,} (the caption was ended where it repeated itself)"}
    rows = {label: text for label, text in rows.items() if label == "captioned" or text[0] != "0"}
    if p.reasons:
        rows["reasons"] = "\n".join(f"{number:,} {name}" for name, number in p.reasons.shown(MAX_NAMES_IN_ROW))
    if p.ignored:
        rows["ignored"] = ", ".join(f"{number:,} {name}" for name, number in p.ignored.shown(MAX_NAMES_IN_ROW))
    rows["time"] = f"{p.seconds:.1f} s"
    rows["speed"] = f"{p.images_per_second:.2f} {p.unit}/s"
    rows["tokens"] = f"{p.num_tokens:,} written by the model"
    rows["engine waited"] = f"{p.engine_wait_share:.1%} of the time since the first {_noun(p)} was prepared"
    rows["model"] = job.settings.model
    rows["prompt"] = "\n".join(_prompts(job))
    if job.output.path is not None:
        rows["output"] = str(job.output.path)
    return rows


def as_lines(summary: dict[str, str]) -> str:
    """Format the summary in two columns."""
    width = max(map(len, summary))
    indent = "\n" + " " * (width + 2)
    lines = {label: indent.join(map(printable, text.split("\n"))) for label, text in summary.items()}
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines.items())


def _noun(progress: "Progress") -> str:
    return {"images": "image", "clips": "clip", "records": "image or clip"}[progress.unit]


def _prompts(job: "CaptionRun") -> list[str]:
    """Return the prompt, or a preset's two prompts for images and clips; several prompts have their names."""
    has_clips, settings = job.progress.num_clips > 0, job.settings
    if settings.prompts is not None:
        return [f"{one['name']}: {one['prompt']}" for one in settings.prompts]
    prompts = [settings.prompt] * (job.progress.unit != "clips") + [settings.video_prompt] * has_clips
    return list(dict.fromkeys(prompts))


def _again(job: "CaptionRun") -> str:
    """Return advice on failures, unless there are no records to resume from, or a retry has just failed."""
    is_retried = job.output.journal is None or job.retries_failed
    return "" if is_retried else "; --retry-failed retries them, once they are fixed"


def _skipped(job: "CaptionRun") -> str:
    if job.retries_failed:
        return "(not recorded as failed)"
    if job.output.files is not None and job.output.files.skip_existing:
        return "(recorded by an earlier run, or the caption file exists)"
    return "(recorded by an earlier run, or given twice)"


@contextmanager
def own_stdout(executor: str) -> Iterator[TextIO]:
    """Yield the stream for captions; redirect Ray's reports of lost workers to standard error."""
    out = sys.stdout
    with redirect_stdout(sys.stderr if executor == "ray" and not out.isatty() else out):
        yield out


class Printer:
    """Prints the captions that are not recorded, and the reasons of failures.

    Args:
        out: the stream for captions; failures are printed to standard error.
        prints_all: print every record; otherwise, only the first failures.
        as_json: print records instead of their texts.
    """

    def __init__(self, out: TextIO, prints_all: bool, as_json: bool):
        self._out, self._prints_all, self._as_json = out, prints_all, as_json
        self._num_failed = 0

    def __call__(self, record: dict) -> None:
        if self._prints_all and self._as_json:
            _write(json.dumps(record), self._out)
        elif record["error"] is not None:
            self._fail(record)
        elif self._prints_all:
            for name, caption in shown_captions(record):
                text = printable(caption, keeps="\n\t")
                _write(f"{printable(_shown_path(record))}{f' [{name}]' if name else ''}: {text}", self._out)

    def _fail(self, record: dict) -> None:
        self._num_failed += 1
        if self._prints_all or self._num_failed <= MAX_FAILURES:
            _write(f"{printable(_shown_path(record))}: {printable(record['error'])}", sys.stderr)
        elif self._num_failed == MAX_FAILURES + 1:
            _write("further failures are recorded, and not printed", sys.stderr)


def _shown_path(record: dict) -> str:
    """Return the path without a login, with the seconds of a clip that is only a part of its video."""
    path, start, end = without_login(record["path"]), record.get("start"), record.get("end")
    if end is None or (start == 0 and end == record["duration"]):
        return path
    return f"{path} {start:g}-{end:g} s"


def _write(text: str, file: TextIO) -> None:
    from tqdm import tqdm  # tqdm.write does not garble the progress bar

    tqdm.write(text, file=file)
