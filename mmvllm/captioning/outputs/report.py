"""Writes captions as a report in one HTML file without network access, for 10,000 images and clips and more.

The page is written while the records are read. Blocks of JSON come first, with card texts, complete records and
thumbnails in separate elements; counts and throughput follow. The page's script makes cards from the blocks as the
reader scrolls, lets the reader edit captions, and offers the edited records for download. Texts of records are written
only as JSON or escaped, and the page's content security policy allows no other script and no requests.
"""

import base64
import hashlib
import html
import json
import os
import re
import urllib.parse
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from mmvllm.captioning.multi_prompt import LIST, shown_captions
from mmvllm.captioning.outputs.atomic_write import check_regular, replacing
from mmvllm.captioning.outputs.record import as_line, is_clip
from mmvllm.captioning.outputs.throughput import draw_throughput, measure_throughput
from mmvllm.captioning.sources.names import MAX_PATH
from mmvllm.captioning.sources.tars import Source, TarMember, tar_members
from mmvllm.captioning.sources.timeouts import DEFAULT_TIMEOUTS, Timeouts

GENERATOR = b'<meta name="generator" content="mmvllm caption">'
MAX_IMAGES = 10_000  # shown with a caption
MAX_FAILURES = 2_000  # shown with a reason
MAX_BOXES = 100  # drawn on one image
MAX_CHARACTERS = 2**18  # of a record's line; longer records are counted but not shown
BLOCK = 100  # records in one piece of JSON
NUM_WORKERS = min(4, os.cpu_count() or 1)
LOOKAHEAD = 8 * NUM_WORKERS

_URL = re.compile(r"https?://", re.IGNORECASE)
_TEXTS = ("path", "id", "caption", "error", "duplicate_of", "finish_reason")
_CLIP_NUMBERS = ("duration", "start", "end", "num_frames")
_NUMBERS = ("width", "height", "prompt_tokens", "completion_tokens", "seconds", "time", *_CLIP_NUMBERS)
_INERT = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})


def write_report(
    path: Path,
    records: Iterable[dict],
    summary: dict[str, str],
    title: str = "Captions",
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
) -> None:
    """Write a page with thumbnails, captions, failures, counts and throughput of `records`, which are iterated once.

    Files are read again for thumbnails, within the `timeouts`, except images on the web and images that could not be
    loaded. Raises ValueError if the page cannot be written to `path`, and any exception of `records`; an earlier page
    is then kept.
    """
    path = Path(path)
    head, body = _template().split("{{records}}")
    tally = _Tally()
    check_place(path)
    with replacing(path) as file:
        file.write(_fill(head, title=html.escape(_clean(title)), policy=_policy(head + body)))
        cards = _cards(filter(tally.add, records), Path(path.parent).absolute(), timeouts)
        with closing(cards):
            _write_blocks(file, cards)
        curve = measure_throughput(tally.times)
        file.write(
            _fill(
                body,
                title=html.escape(_clean(title)),
                counts=str(tally),
                summary=_table(summary) if summary else "",
                curve=draw_throughput(curve, tally.noun) if curve else "",
            )
        )


def _template() -> str:
    style, script, page = (
        Path(__file__).with_name(f"report.{suffix}").read_text(encoding="utf-8") for suffix in ("css", "js", "html")
    )
    return page.replace("{{style}}", style).replace("{{script}}", script)


def _fill(template: str, **values: str) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _policy(template: str) -> str:
    """Return the content security policy, which allows this style, this script and embedded images."""
    hashes = {
        tag: base64.b64encode(
            hashlib.sha256(re.search(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)[1].encode()).digest()
        )
        for tag in ("style", "script")
    }
    return "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; " + "; ".join(
        f"{tag}-src 'sha256-{digest.decode()}'" for tag, digest in hashes.items()
    )


def check_place(path: Path) -> None:
    """Raise ValueError if the page cannot be written to `path`, or if another file would be replaced."""
    if not path.parent.is_dir():
        raise ValueError(f"report {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ValueError(f"report {path}: is a folder; give the name of a file")
    check_regular(path)
    if path.exists() and GENERATOR not in path.open("rb").read(4096):
        raise ValueError(f"report {path}: exists, and is not an earlier report; choose another name")


class _Tally:
    """The counts of all records, including records that are not shown."""

    def __init__(self):
        self.captioned = self.failed = self.duplicates = self.clips = self.long = 0
        self.times = array("d")  # 8 bytes per record, also for records that are not shown

    def add(self, record: dict) -> bool:
        """Count a record; return whether it is shown."""
        if (time := _number(record.get("time"))) is not None:
            self.times.append(time)
        self.clips += is_clip(record)
        self.duplicates += record.get("duplicate_of") is not None
        if record.get("error") is not None:
            self.failed += 1
            is_wanted = self.failed <= MAX_FAILURES
        else:
            self.captioned += 1
            is_wanted = self.captioned <= MAX_IMAGES
        is_long = is_wanted and len(as_line(record)) > MAX_CHARACTERS
        self.long += is_long
        return is_wanted and not is_long

    @property
    def noun(self) -> str:
        if not self.clips:
            return "Images"
        return "Clips" if self.clips == self.captioned + self.failed else "Images and clips"

    def __str__(self) -> str:
        number, duplicates = self.captioned + self.failed, _count(self.duplicates, "duplicate")
        kinds = ((number - self.clips, "image"), (self.clips, "clip"))
        found = " and ".join(_count(each, noun) for each, noun in kinds if each) or _count(0, "image")
        text = f"{found}: {self.captioned:,} captioned, {self.failed:,} failed; {duplicates}."
        if self.captioned > MAX_IMAGES:
            text += f" The first {MAX_IMAGES:,} of {self.captioned:,} captioned {self.noun.lower()} are shown."
        if self.failed > MAX_FAILURES:
            text += f" The first {MAX_FAILURES:,} of {self.failed:,} failures are shown."
        if self.long:
            text += f" {_count(self.long, 'record')} of more than {MAX_CHARACTERS:,} characters are not shown."
        if self.captioned > MAX_IMAGES or self.failed > MAX_FAILURES or self.long:
            text += " A download has only the records that are shown."
        return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# Cards


def _cards(records: Iterable[dict], home: Path, timeouts: Timeouts) -> Iterator[tuple[dict, str, str | None]]:
    """Yield the card, the line of JSON and the thumbnail of each record; threads make a few thumbnails ahead."""
    from mmvllm.captioning.outputs.thumbnails import strip_of_frames, thumbnail
    from mmvllm.captioning.sources.loading import ItemLoader  # imported here because they import torch

    pending: deque[tuple[dict, str, Future[str | None]]] = deque()
    index_of: dict[tuple, int] = {}  # the card of each image or clip, for its duplicates
    tar_index = lru_cache(maxsize=8)(_tar_index)  # several engines may caption several tars at a time
    with (
        ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="mmvllm-thumbnail") as pool,
        closing(ItemLoader(timeouts, NUM_WORKERS, accept_truncated=True)) as loader,
    ):
        for index, record in enumerate(records):
            card = _card(record, home)
            if (original := index_of.get((card.get("duplicate_of"), card.get("start")))) is not None:
                card["same"] = original
            elif "web" not in card:
                index_of[card["path"], card.get("start")] = index
            has_none = {"same", "web"} & card.keys() or _could_not_be_loaded(record)
            source = None if has_none else _source(_path(record), tar_index)
            made = (
                pool.submit(strip_of_frames, loader, source, record["start"], record.get("end"))
                if is_clip(record)
                else pool.submit(thumbnail, loader, source, _path(record))
            )
            pending.append((card, as_line(record), made))
            if len(pending) > LOOKAHEAD:
                card, line, made = pending.popleft()
                yield card, line, made.result()
        for card, line, made in pending:
            yield card, line, made.result()


def _could_not_be_loaded(record: dict) -> bool:
    """Return whether an image or a clip failed before its size was known; loading it again may take as long."""
    return record.get("error") is not None and record.get("width") is None


def _card(record: dict, home: Path) -> dict[str, Any]:
    """Return the fields of a record that the page shows, without None values."""
    path = _path(record)
    card = {key: _clean(record[key]) for key in _TEXTS if record.get(key) is not None}
    card |= {key: number for key in _NUMBERS if (number := _number(record.get(key))) is not None}
    card |= {"path": _clean(path)}
    if more := [_clean(f"{name}: {text}" if name else text) for name, text in _further(record)]:
        card["more"] = more
    if drawn := list(islice(_drawn(record.get("boxes"), card.get("width"), card.get("height")), MAX_BOXES)):
        card["boxes"] = drawn
    if _URL.match(path):
        return card | {"link": _clean(path), "web": True}
    return card | ({"link": _link(path, home)} if os.path.isfile(path) else {})


def _further(record: dict) -> list[tuple[str | None, str]]:
    """Return the captions of a record with several, except the one that its card shows first."""
    captions = shown_captions(record) if isinstance(record.get(LIST), list) else []
    return captions if record.get("caption") is None else captions[1:]


def _drawn(boxes: Any, width: float | None, height: float | None) -> Iterator[list]:
    """Yield [left, top, width, height, label] of each box or point, in percent of the image."""
    if not (isinstance(boxes, list) and width and height):
        return
    for box in boxes:
        corners, point = (box.get("box"), box.get("point")) if isinstance(box, dict) else (None, None)
        corners = corners or (point * 2 if isinstance(point, list) else None)
        if isinstance(corners, list) and len(corners) == 4 and None not in map(_number, corners):
            x1, y1, x2, y2 = (100 * value / side for value, side in zip(corners, (width, height) * 2, strict=True))
            edges = [round(value, 2) for value in (x1, y1, x2 - x1, y2 - y1)]
            yield [*edges, _clean(label) if (label := box.get("label")) is not None else ""]


def _link(path: str, home: Path) -> str:
    """Return a link, relative if the file is in or below the page's folder, so that both can be moved together."""
    absolute = Path(path).absolute()
    if absolute.is_relative_to(home):
        return "./" + urllib.parse.quote(os.fsencode(absolute.relative_to(home)))
    return absolute.as_uri()


def _path(record: dict) -> str:
    return str(record.get("path") or "")


def _source(path: str, tar_index: Callable[[str], dict[str, TarMember]]) -> Source | None:
    if len(path) > MAX_PATH:
        return path
    if os.path.isfile(path):
        return str(Path(path).absolute())  # even if its name is like "~a.jpg" or "data:a.jpg"
    for match in re.finditer(r"\.tar/", path, re.IGNORECASE):
        tar, member = path[: match.end() - 1], path[match.end() :]
        if os.path.isfile(tar):
            return tar_index(tar).get(member)
    return path


def _tar_index(tar: str) -> dict[str, TarMember]:
    index = {}
    with suppress(ValueError):  # of a damaged tar, use the members before the damage
        for name, member in tar_members(tar):
            index.setdefault(name, member)  # of several members with one name, the first was captioned
    return index


def _write_blocks(file: TextIO, cards: Iterator[tuple[dict, str, str | None]]) -> None:
    while block := list(islice(cards, BLOCK)):
        records, lines, thumbnails = zip(*block, strict=True)
        file.write(f'<script type="application/json" class="records">{_json(records)}</script>\n')
        file.write(f'<script type="application/json" class="lines">{_json(lines)}</script>\n')
        file.write(
            f'<script type="application/json" class="thumbnails" data-size="{BLOCK}">{_json(thumbnails)}</script>\n'
        )


def _json(value: Any) -> str:
    """Return JSON without characters that could end a script element or begin a comment."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_INERT)


def _clean(value: Any) -> str:
    """Return the text with surrogates escaped, because file names need not be Unicode."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and abs(value) < 1e15 else None  # not NaN or infinite


def _table(summary: dict[str, str]) -> str:
    rows = (
        f'<tr><th scope="row">{html.escape(_clean(label))}</th><td dir="auto">{html.escape(_clean(text))}</td></tr>\n'
        for label, text in summary.items()
    )
    return f"<table>\n{''.join(rows)}</table>\n"
