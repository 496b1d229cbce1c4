"""What makes FFmpeg's index of an MP4 long is counted before FFmpeg makes it."""

import io
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from mmvllm.errors import VideoError
from mmvllm.processors.videos import decode, scan
from mmvllm.processors.videos.limits import ANY_VIDEO
from mmvllm.processors.videos.load import load_video, load_video_info
from mmvllm.processors.videos.scan import FEW_ENTRIES, scan_boxes
from tests.helpers.media.videos import FramesAt, make_clip, moving

CONTAINERS = (b"moov", b"trak", b"edts", b"mdia", b"minf", b"stbl", b"moof", b"traf")


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def numbers(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def rebuilt(data: bytes, make: Callable[[bytes, bytes], bytes]) -> bytes:
    """A file with what `make` gives for the type and content of each box without others inside."""
    at, out = 0, b""
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        content = data[at + 8 : at + size]
        out += box(kind, rebuilt(content, make)) if kind in CONTAINERS else make(kind, content)
        at += size
    return out


def changed(data: bytes, change: Callable[[bytes, bytes], bytes]) -> bytes:
    """A file whose boxes have the content that `change` gives."""
    return rebuilt(data, lambda kind, content: box(kind, change(kind, content)))


def with_content(data: bytes, **contents: bytes) -> bytes:
    return changed(data, lambda kind, content: contents.get(kind.decode("latin-1"), content))


class CountedReads(io.BytesIO):
    num_reads = 0

    def read(self, *args) -> bytes:
        self.num_reads += 1
        return super().read(*args)


@pytest.fixture
def clip(tmp_path) -> bytes:
    return make_clip(tmp_path / "a.mp4", 24, codec="mpeg4").read_bytes()


def assert_refused(data: bytes, words: str) -> None:
    for load in (lambda file: load_video(file, FramesAt()), load_video_info):
        with pytest.raises(VideoError, match=words):
            load(io.BytesIO(data))


def entries(data: bytes) -> int:
    """How long FFmpeg's index is, of all tracks."""
    with av.open(io.BytesIO(data)) as container:
        return sum(len(stream.index_entries) for stream in container.streams)


@pytest.mark.parametrize("number", [FEW_ENTRIES + 1, 2**31 - 1, 2**32 - 1])
def test_samples_of_equal_size_take_no_bytes_and_are_counted(clip, number):
    declared = with_content(clip, stsz=numbers(0, 1, number), stts=numbers(0, 1, number, 1))
    assert_refused(declared, f"an index of {number} entries, more than {FEW_ENTRIES}")


def test_samples_of_fragments_are_counted_whatever_the_last_track_is(tmp_path):
    clip = make_clip(tmp_path / "a.mp4", 24, codec="mpeg4", options={"movflags": "frag_keyframe+empty_moov"})
    sound = box(b"hdlr", numbers(0, 0) + b"soun" + numbers(0, 0, 0)) + box(b"stts", numbers(0, 1, 1, 1))
    data = with_content(clip.read_bytes(), trun=numbers(0, FEW_ENTRIES // 2))  # three fragments
    assert_refused(data, "an index of 10000[0-9] entries")
    at = data.index(b"moof") - 4
    assert_refused(data[:at] + box(b"moov", box(b"trak", sound)) + data[at:], "an index of 10000[0-9] entries")


TABLE = box(b"stsz", numbers(0, 1, FEW_ENTRIES + 1))
PARENTS = [b"udta", b"dinf", b"tref", b"mvex", b"sinf", b"schi", b"wave", b"ilst", b"mdia", b"stsd", b"meta"]


@pytest.mark.parametrize("parent", PARENTS)
def test_tables_are_found_wherever_ffmpeg_finds_them(parent, clip):
    def make(kind: bytes, content: bytes) -> bytes:
        if kind == b"stsd" == parent:  # behind the fields of the first codec
            (size,) = struct.unpack_from(">I", content, 8)
            return box(kind, content[:8] + numbers(size + len(TABLE)) + content[12:] + TABLE)
        if kind != b"stsz":
            return box(kind, content)
        inside = {b"stsd": b"", b"meta": numbers(0) + box(b"hdlr", bytes(24)) + TABLE}.get(parent, TABLE)
        return box(parent, inside) if inside else b""

    data = rebuilt(clip, make)
    assert entries(data) == 24  # FFmpeg has as many as there are in the chunks
    assert_refused(data, f"an index of {FEW_ENTRIES + 1} entries")


def test_edits_that_repeat_samples_are_counted(clip, monkeypatch):
    repeated = with_content(clip, elst=numbers(0, 500) + numbers(10**6, 0, 0x10000) * 500)
    monkeypatch.setattr(scan, "MAX_ENTRIES", entries(repeated) - 1)
    assert entries(repeated) > 1000
    assert_refused(repeated, "an index of 12000 entries")


def test_edits_are_counted_by_the_size_of_their_table(clip, monkeypatch):
    edits = numbers(0, 1) + numbers(10**6, 0, 0x10000) * 500
    monkeypatch.setattr(scan, "MAX_ENTRIES", 1000)
    assert_refused(with_content(clip, elst=edits), "an index of 12000 entries")


def test_tables_that_end_too_early_are_read_beyond_their_ends(clip):
    short = box(b"stsz", b"") + struct.pack(">I4sI", 12, b"\0\0\0\1", FEW_ENTRIES + 1)  # a box of an odd type
    data = rebuilt(clip, lambda kind, content: short if kind == b"stsz" else box(kind, content))
    assert_refused(data, f"an index of {FEW_ENTRIES + 1} entries")


def test_fragments_of_many_tracks_are_counted():
    tracks, fragments = box(b"trak", b"") * 5000, box(b"moof", b"") * 4001
    data = box(b"ftyp", b"isom" + numbers(0)) + box(b"moov", tracks) + fragments
    assert_refused(data, "an index of 105000 entries")


def test_as_many_samples_as_a_file_has_bytes_are_accepted(clip):
    """Recordings of hours, for example of many tracks of sound, have millions."""
    table = with_content(clip, stsz=numbers(0, 1, FEW_ENTRIES + 5000))
    assert_refused(table, f"an index of {FEW_ENTRIES + 5000} entries")
    scan_boxes(io.BytesIO(table + box(b"free", bytes(FEW_ENTRIES + 5000))), "it")


SOUND = box(b"hdlr", numbers(0, 0) + b"soun" + numbers(0, 0, 0))
DECOYS = {  # which FFmpeg does not read
    "another handler": box(b"free", SOUND),
    "another table of durations": box(b"free", box(b"stts", numbers(0, 1, 24, 1)) + SOUND),
    "another track": box(b"free", box(b"trak", b"")),
}


@pytest.mark.parametrize("decoy", DECOYS)
@pytest.mark.parametrize("is_before", [True, False])
def test_no_box_makes_the_number_smaller(decoy, is_before, clip):
    table = box(b"stsz", numbers(0, 1, FEW_ENTRIES // 500))
    table = DECOYS[decoy] + table if is_before else table + DECOYS[decoy]
    edits = numbers(0, 501) + numbers(10**6, 0, 0x10000) * 501
    data = changed(clip, lambda kind, content: edits if kind == b"elst" else content)
    data = rebuilt(data, lambda kind, content: table if kind == b"stsz" else box(kind, content))
    assert_refused(data, "an index of 100200 entries")


def test_sums_do_not_overflow(clip):
    runs = numbers(0, 160) + numbers(1, 2**32 - 1, 1, 2**32 - 1, 2**32 - 1, 1) * 80
    tables = box(b"stsc", runs) + box(b"stco", numbers(0, 2**32 - 1))
    data = rebuilt(clip, lambda kind, content: tables if kind == b"stsc" else box(kind, content))
    assert_refused(data, "an index of")


@pytest.mark.parametrize("duration", [1, 2**32 - 1])
def test_a_table_of_chunks_does_not_hide_another(duration, clip):
    def make(kind: bytes, content: bytes) -> bytes:
        many, few = box(b"stsc", numbers(0, 1, 1, 2**31, 1)), box(b"stsc", numbers(0, 1, 1, 1, 1))
        made = {b"stsc": many + box(b"free", few), b"stts": box(b"stts", numbers(0, 1, 24, duration))}
        return made.get(kind, SOUND if kind == b"hdlr" else box(kind, content))

    assert_refused(rebuilt(clip, make), "an index of")


def test_the_boxes_in_meta_begin_with_its_handler():
    """FFmpeg looks for it, whatever comes before it."""
    hidden = numbers(2**31 - 1) + b"mdatmdat" + SOUND + TABLE
    assert_refused(box(b"ftyp", b"isom" + numbers(0)) + box(b"moov", box(b"meta", hidden)), "an index of")
    deep = TABLE
    for _ in range(400):
        deep = box(b"meta", numbers(0) + SOUND + deep)
    file = CountedReads(box(b"moov", deep))
    scan_boxes(file, "it")
    assert file.num_reads < 100


def test_many_chapters_take_no_memory():
    assert decode._options(ANY_VIDEO)["ignore_chapters"] == "1"


def test_a_compressed_header_is_refused():
    start = box(b"ftyp", b"qt  " + numbers(0))
    header = box(b"dcom", b"zlib") + box(b"cmvd", numbers(10**9))
    for kind in (b"moov", b"free", b"hoov"):  # FFmpeg also finds the header of a file that was repaired
        assert_refused(start + box(kind, box(b"cmov", header)), "a compressed header")


def sound_and_video(path: Path) -> bytes:
    """A second of sound without compression, and of frames."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=8)
        video.height, video.width, video.pix_fmt = 64, 96, "yuv420p"
        sound = container.add_stream("pcm_s16le", rate=48000, layout="mono")
        for pixels in moving(8, 64, 96):
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode())
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 48000), np.int16), format="s16", layout="mono")
        frame.rate, frame.time_base = 48000, Fraction(1, 48000)
        container.mux(sound.encode(frame))
        container.mux(sound.encode())
    return path.read_bytes()


def test_sound_without_compression_has_an_entry_for_many_samples(tmp_path, monkeypatch):
    data = sound_and_video(tmp_path / "a.mov")
    monkeypatch.setattr(scan, "MAX_ENTRIES", entries(data) - 1)
    assert_refused(data, "an index of")
    monkeypatch.setattr(scan, "MAX_ENTRIES", 10 * entries(data))
    assert load_video_info(io.BytesIO(data)).total_num_frames == 8
    as_video = changed(data, lambda kind, content: content.replace(b"soun", b"vide") if kind == b"hdlr" else content)
    assert_refused(as_video, "an index of 48008 entries")


def test_boxes_of_any_size_and_depth_are_followed_to_the_end_of_the_file():
    start, samples = box(b"ftyp", b"isom" + numbers(0)), box(b"stsz", numbers(0, 1, FEW_ENTRIES + 1))
    large = struct.pack(">I4sQ", 1, b"moov", 16 + len(samples)) + samples
    to_the_end, beyond_it = (numbers(size) + b"moov" + samples for size in (0, 10**9))
    for header in (large, to_the_end, beyond_it, box(b"wide", b"") + large):
        assert_refused(start + header, f"an index of {FEW_ENTRIES + 1} entries")
    scan_boxes(io.BytesIO(start + numbers(4, 0) + large), "it")  # FFmpeg reads nothing behind such a size
    deep = b""
    for _ in range(2000):
        deep = box(b"moov", deep)
    scan_boxes(io.BytesIO(deep), "it")
