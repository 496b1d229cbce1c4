"""A scan of the boxes of an MP4 or QuickTime file (ISO 14496-12), before FFmpeg opens it.

While FFmpeg opens such a file, it makes an entry of its index, of about 35 bytes, for every sample that the file
declares, again for every edit in which the sample is shown. Samples of equal size take no bytes in the file: one of
20 kB may declare billions. A compressed header may inflate to any size.
"""

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from mmvllm.errors import VideoError

MAX_ENTRIES = 10_000_000  # of the index; 46 hours at 60 frames per second
MAX_DEPTH = 10  # boxes inside each other, which is FFmpeg's limit, too
ENTRY_SAMPLES = 1024  # of sound without compression, which have one entry together

_CONTAINERS = frozenset(b"moov hoov free trak edts mdia minf stbl moof traf".split())  # FFmpeg finds headers in all

_SAMPLES = {b"stsz": 8, b"stz2": 8, b"trun": 4}  # boxes that have a number of samples, and where
_MEDIA = (b"vide", b"soun", b"subp", b"clcp")  # handlers that say what a track has; others say where its data are


def scan_boxes(file: str | BinaryIO, name: str, check_time: Callable[[], None]) -> None:
    """Raise VideoError, which calls the video `name`, for an index that takes unreasonable memory.

    Args:
        file: a path, or a binary file object that can seek; other formats have no such boxes.
        check_time: called for each box; raises an error if the scan takes too long.
    """
    if isinstance(file, str):
        with open(file, "rb") as opened:
            return scan_boxes(opened, name, check_time)
    file.seek(0, os.SEEK_END)
    num_entries, track = 0, Track()
    for kind, content in _boxes(file, 0, file.tell(), depth=0):
        check_time()
        if kind == b"cmov":
            raise VideoError(name, "has a compressed header (cmov); convert it first, for example with FFmpeg")
        if kind == b"trak":
            num_entries, track = num_entries + track.num_entries, Track()
        track.add(kind, content)
        if num_entries + track.num_entries > MAX_ENTRIES:
            number = num_entries + track.num_entries
            raise VideoError(name, f"has an index of {number} samples, more than {MAX_ENTRIES}; cut it first")
    return None


@dataclass(slots=True)
class Track:
    """What a track declares, as far as it says how long FFmpeg's index of it is."""

    num_samples: int = 0
    num_edits: int = 1
    num_chunks: int = 0
    chunk_samples: int = 0  # of the largest chunk
    durations: list[int] = field(default_factory=list)  # of runs of samples, as far as two of them
    handler: bytes = b""

    @property
    def num_entries(self) -> int:
        is_raw_sound = self.handler == b"soun" and self.durations == [1]  # as FFmpeg tells it from other tracks
        entries = self.num_chunks * -(-self.chunk_samples // ENTRY_SAMPLES) if is_raw_sound else self.num_samples
        return entries * self.num_edits

    def add(self, kind: bytes, content: "Content") -> None:
        if kind == b"hdlr":
            handler = content.read(8, 4)
            self.handler = handler if handler in _MEDIA else self.handler
        elif kind in _SAMPLES:
            self.num_samples += content.number(_SAMPLES[kind])
        elif kind == b"elst":
            self.num_edits = max(self.num_edits, content.number(4))
        elif kind in (b"stco", b"co64"):
            self.num_chunks = max(self.num_chunks, content.number(4))
        elif kind == b"stsc":
            runs = content.read(8, content.size - 8)
            self.chunk_samples = int(np.frombuffer(runs, ">u4", len(runs) // 12 * 3)[1::3].max(initial=0))
        elif kind == b"stts":
            self.durations = [content.number(12 + 8 * i) for i in range(min(content.number(4), 2))]


class Content:
    """The bytes of a box behind its type."""

    def __init__(self, file: BinaryIO, start: int, end: int):
        self._file, self._start, self.size = file, start, end - start

    def read(self, offset: int, size: int) -> bytes:
        self._file.seek(self._start + offset)
        return self._file.read(max(0, min(size, self.size - offset)))

    def number(self, offset: int) -> int:
        """Four bytes; 0 behind the end."""
        return int.from_bytes(self.read(offset, 4))


def _boxes(file: BinaryIO, at: int, end: int, depth: int) -> Iterator[tuple[bytes, Content]]:
    """(type, content) of all boxes, those with others inside before them; like FFmpeg, sizes end with the file."""
    while at + 8 <= end and depth <= MAX_DEPTH:
        file.seek(at)
        size, kind = struct.unpack(">I4s", file.read(8))
        start = at + 8
        if size == 1:
            start, size = at + 16, int.from_bytes(file.read(8))
        stop = end if size == 0 else min(at + size, end)
        if stop < start:
            return
        yield kind, Content(file, start, stop)
        if kind in _CONTAINERS:
            yield from _boxes(file, start, stop, depth + 1)
        at = stop
