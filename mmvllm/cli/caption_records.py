"""Captions and failures as `mmvllm caption` prints them while it runs."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from mmvllm.captioning.several import shown_captions
from mmvllm.processors.download import without_login
from mmvllm.utils.text import printable

MAX_FAILURES = 10  # printed while captions are recorded


@contextmanager
def own_stdout(executor: str) -> Iterator[TextIO]:
    """The stream for captions; Ray prints reports of lost workers, which are redirected to standard error."""
    out = sys.stdout
    with redirect_stdout(sys.stderr if executor == "ray" and not out.isatty() else out):
        yield out


class Printer:
    """Prints the captions, if they are not recorded, and the reasons of failures.

    Args:
        out: the stream for captions; failures are printed to standard error.
        prints_all: print every record; without it, only the first failures.
        as_json: print records, rather than their texts.
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
                _write(f"{printable(_name(record))}{f' [{name}]' if name else ''}: {text}", self._out)

    def _fail(self, record: dict) -> None:
        self._num_failed += 1
        if self._prints_all or self._num_failed <= MAX_FAILURES:
            _write(f"{printable(_name(record))}: {printable(record['error'])}", sys.stderr)
        elif self._num_failed == MAX_FAILURES + 1:
            _write("further failures are recorded, and not printed", sys.stderr)


def _name(record: dict) -> str:
    """The path without a login, with the seconds of a clip that is only a part of its video."""
    path, start, end = without_login(record["path"]), record.get("start"), record.get("end")
    if end is None or (start == 0 and end == record["duration"]):
        return path
    return f"{path} {start:g}-{end:g} s"


def _write(text: str, file: TextIO) -> None:
    from tqdm import tqdm  # tqdm.write does not garble the progress bar

    tqdm.write(text, file=file)
