"""Scan the boxes of an MP4 or QuickTime file (ISO 14496-12) before FFmpeg opens it.

When FFmpeg opens such a file, it creates an index entry of about 35 bytes for every sample that the file declares, once
per edit that shows the sample. Samples of equal size take no bytes in the file: a file of 20 kB may declare billions. A
compressed header may inflate to any size. This scan follows FFmpeg's demuxer as far as it is known; only a memory limit
of the process, as in worker processes, bounds the memory in all cases.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from mmvllm.errors import VideoError

MAX_ENTRIES = 100_000_000  # of the index, which take 3.5 GB; 460 hours at 60 frames per second
FEW_ENTRIES = 100_000  # accepted even for small files; otherwise a file needs a byte per entry
MAX_DEPTH = 10  # of nested boxes; also FFmpeg's limit
MAX_RUNS = 1_000_000  # of chunks with the same number of samples; a table of them has 12 MB
ENTRY_SAMPLES = 160  # of uncompressed sound per index entry; most formats have 1024
READ_BYTES = 1 << 18  # per read, when searching for a box
MAX_DESCRIPTIONS = 1024 * 1024  # bytes of a table of codecs

_OF_FRAGMENTS = (b"trun", b"senc")  # tables of samples
_TABLES = (*_OF_FRAGMENTS, b"stsz", b"stz2", b"elst", b"cmov", b"hdlr", b"stco", b"co64", b"stsc", b"stts", b"ctts")
# These boxes have no boxes inside. FFmpeg finds tables in most other boxes, even where the format allows none.
_OPAQUE = {*_TABLES, b"mdat", b"idat", b"uuid", b"stss"}
_MEDIA = {b"vide", b"soun", b"subp", b"clcp"}  # handlers that say what a track has; others say where its data are


def scan_boxes(file: str | BinaryIO, name: str) -> None:
    """Raise VideoError, which calls the video `name`, for an index that may take unreasonable memory.

    Args:
        file: a path, or a seekable binary file object; files of other formats have no such boxes.
    """
    if isinstance(file, str):
        with open(file, "rb") as opened:
            return scan_boxes(opened, name)
    num_bytes = file.seek(0, os.SEEK_END)
    most = min(MAX_ENTRIES, max(FEW_ENTRIES, num_bytes))
    num_entries, num_tracks, max_edits, track = 0, 0, 1, Track()
    for kind, content in _boxes(file, 0, num_bytes, depth=0):
        if kind == b"cmov":
            raise VideoError(name, "has a compressed header (cmov); convert it first, for example with FFmpeg")
        if kind == b"stsd" and content.size > MAX_DESCRIPTIONS:
            raise VideoError(name, f"describes its codecs in {content.size} bytes, more than {MAX_DESCRIPTIONS}")
        if kind == b"trak":
            num_entries, num_tracks, track = num_entries + track.num_entries, num_tracks + 1, Track()
        elif kind in _OF_FRAGMENTS:
            num_entries += content.number(4)
        elif kind == b"moof":
            num_entries += num_tracks  # a fragment has an entry for each track
        elif kind == b"elst":  # FFmpeg counts by the size of the table
            max_edits = max(max_edits, content.number(4), (content.size - 8) // 12)
        else:
            track.add(kind, content)
        if (number := (num_entries + track.num_entries) * max_edits) > most:
            raise VideoError(name, f"may have an index of {number} entries, more than {most}; cut it first")
    return None


@dataclass(slots=True)
class Track:
    """The declarations of a track that determine how long FFmpeg's index may become.

    FFmpeg ignores some of the boxes found here, so no box may lower the estimate.
    """

    num_samples: int = 0
    num_chunks: int = 0
    runs: list[np.ndarray] = field(default_factory=list)  # (n, 3): first chunk, samples of each, codec
    durations: list[list[int]] = field(default_factory=list)  # per table: of its first two runs of samples
    handlers: set[bytes] = field(default_factory=set)
    has_offsets: bool = False  # whether presentation times differ from decoding times

    @property
    def num_entries(self) -> int:
        if not self.durations or any(one not in ([1], [-1 % 2**32]) for one in self.durations):
            return max(self.num_samples, self._num_sound_entries())
        # FFmpeg treats such a track as uncompressed sound if its handler, or its codec, says that it is sound.
        is_sound = self.handlers == {b"soun"} and not self.has_offsets
        return max(self._num_sound_entries(), 0 if is_sound else self.num_samples)

    def _num_sound_entries(self) -> int:
        return max(map(self._num_entries_of, self.runs), default=0)

    def _num_entries_of(self, runs: np.ndarray) -> int:
        first, samples = runs[:, 0].astype(np.float64), runs[:, 1].astype(np.float64)  # sums do not overflow
        num_chunks = np.diff(first, append=self.num_chunks + 1).clip(0, self.num_chunks)
        return int((num_chunks * np.ceil(samples / ENTRY_SAMPLES)).sum())

    def add(self, kind: bytes, content: "Content") -> None:
        if kind == b"hdlr":
            self.handlers |= {content.read(8, 4)} & _MEDIA
        elif kind in (b"stsz", b"stz2"):
            self.num_samples += content.number(8)
        elif kind == b"ctts":
            self.has_offsets = True
        elif kind in (b"stco", b"co64"):
            self.num_chunks = max(self.num_chunks, content.number(4))
        elif kind == b"stsc":
            runs = content.read(8, 12 * min(content.number(4), MAX_RUNS))
            self.runs.append(np.frombuffer(runs, ">u4", len(runs) // 12 * 3).reshape(-1, 3))
        elif kind == b"stts":
            self.durations.append([content.number(12 + 8 * i) for i in range(min(content.number(4), 2))])


class Content:
    """The bytes of a box after its type."""

    def __init__(self, file: BinaryIO, start: int, end: int):
        self._file, self.start, self.end = file, start, end

    @property
    def size(self) -> int:
        return self.end - self.start

    def read(self, offset: int, size: int) -> bytes:
        self._file.seek(self.start + offset)
        return self._file.read(max(0, min(size, self.size - offset)))

    def number(self, offset: int) -> int:
        """Return a number of four bytes, even beyond the end of the box, where FFmpeg continues to read."""
        self._file.seek(self.start + offset)
        return int.from_bytes(self._file.read(4))


def _boxes(file: BinaryIO, at: int, end: int, depth: int) -> Iterator[tuple[bytes, Content]]:
    """Yield (type, content) of all boxes, parents before children; as in FFmpeg, sizes end with the file."""
    while at + 8 <= end and depth <= MAX_DEPTH:
        file.seek(at)
        size, kind = struct.unpack(">I4s", file.read(8))
        start = at + 8
        if size == 1:
            start, size = at + 16, int.from_bytes(file.read(8))
        stop = end if size == 0 else min(at + size, end)
        if stop < start:
            return
        content = Content(file, start, stop)
        yield kind, content
        if kind == b"stsd":
            yield from _tables_inside(file, content)
        elif kind not in _OPAQUE:
            inside = _place_of_handler(content) if kind == b"meta" else 0  # a version may precede the boxes inside
            yield from _boxes(file, start + inside, stop, depth + 1)
        at = stop


def _place_of_handler(content: Content) -> int:
    """Return the offset where FFmpeg begins to read the boxes in `meta`; the end of `meta` if it reads none."""
    for offset in range(0, content.size, READ_BYTES):
        data = content.read(offset, READ_BYTES)
        words = np.frombuffer(data, "S4", len(data) // 4)
        if len(found := np.flatnonzero(words == b"hdlr")):
            return offset + 4 * int(found[0]) - 4
    return content.size


def _tables_inside(file: BinaryIO, content: Content) -> Iterator[tuple[bytes, Content]]:
    """Yield the tables after a codec's fields, whose length depends on the codec: tables are searched by name."""
    data = content.read(0, MAX_DESCRIPTIONS)
    for kind in _TABLES:
        at = data.find(kind)
        while at >= 0:
            yield kind, Content(file, content.start + at + 4, content.end)
            at = data.find(kind, at + 4)
