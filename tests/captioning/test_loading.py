"""Videos of a job are decoded in processes, whose memory and crashes do not reach the job."""

import struct
import sys
from contextlib import closing
from pathlib import Path

import pytest

from mmvllm import LLM
from mmvllm.captioning import JobError, caption_images, loading
from mmvllm.captioning.items import Item
from mmvllm.captioning.loading import ItemLoader
from mmvllm.config import MiB
from mmvllm.decoding import VIDEO_BYTES, MediaDecoder
from mmvllm.media import MediaPolicy
from mmvllm.workers import WorkerPool, WorkersUnusable
from tests.helpers import tasks
from tests.helpers.server import ENGINE
from tests.helpers.videos import FramesAt, declare_seconds, make_clip


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **ENGINE) as made:
        yield made


def with_tracks(mp4: bytes, number: int) -> bytes:
    """An MP4 file with `number` tracks that share their packets; FFmpeg decodes each before it knows its size."""
    at = mp4.index(b"moov") - 4
    size, track = struct.unpack_from(">I", mp4, at)[0], mp4.index(b"trak") - 4
    length = struct.unpack_from(">I", mp4, track)[0]
    tracks = mp4[track : track + length] * (number - 1)
    return mp4[:at] + struct.pack(">I", size + len(tracks)) + mp4[at + 4 : track] + tracks + mp4[track:]


def peak(pool: WorkerPool) -> int:
    """Bytes of memory that the only process of the pool had at most."""
    lines = Path(f"/proc/{pool.run(tasks.pid)}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def job() -> ItemLoader:
    return ItemLoader(num_workers=1)


def server() -> MediaDecoder:
    return MediaDecoder(MediaPolicy())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
@pytest.mark.parametrize("made", [job, server])
def test_a_video_that_takes_gigabytes_before_its_size_is_known(made, tmp_path):
    good = make_clip(tmp_path / "good.mp4", 4, size=(2000, 2000))
    hostile = tmp_path / "hostile.mp4"
    hostile.write_bytes(with_tracks(good.read_bytes(), 250))
    with closing(made()) as decoder:
        pool = decoder._pool if made is job else decoder._video_pool

        def load(path: Path) -> None:
            if made is job:
                decoder.info(Item("", "", str(path), is_video=True))
            else:
                decoder._decode_video(path.read_bytes(), FramesAt((0,), (28, 28)), lambda: False)

        load(good)
        before = peak(pool)
        for _ in range(2):
            try:
                load(hostile)
            except ValueError as error:
                assert "memory" in str(error)
        assert 0.5 * VIDEO_BYTES < peak(pool) - before < VIDEO_BYTES + 200 * MiB  # 2.2 GiB without a limit


@pytest.mark.spawns
def test_a_video_that_is_cut_is_captioned_with_a_warning(llm, tmp_path, caplog):
    path = make_clip(tmp_path / "a.mkv", 24)
    path.write_bytes(declare_seconds(path.read_bytes(), 60))
    (record,) = caption_images(path, llm=llm, max_tokens=2)
    assert (record["error"], record["duration"]) == (None, 3.0)
    assert [message for message in caplog.messages if str(path) in message] == [
        f"{path}: declares 60.0 s, but only 3.0 s are there"
    ]


@pytest.mark.spawns
def test_a_video_that_ends_its_process_fails_alone(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_clip", tasks.crash_on)
    (record,) = caption_images(make_clip(tmp_path / "a.mp4"), llm=llm)
    assert "its worker process died twice: it was ended by SIGSEGV" in record["error"]


@pytest.mark.parametrize(("step", "options"), [("load_video", {}), ("load_video_info", {"clip_seconds": 2})])
def test_a_video_that_takes_all_memory_fails_alone(step, options, llm, tmp_path, monkeypatch):
    def needs_too_much(source, *args, **options):
        if source.endswith("a.mp4"):
            raise MemoryError
        return load(source, *args, **options)

    load = getattr(loading, step)
    monkeypatch.setattr(loading, step, needs_too_much)
    for name in ("a.mp4", "b.mp4"):
        make_clip(tmp_path / name, 16)
    failed, made = caption_images(tmp_path, llm=llm, max_tokens=2, ordered=True, **options)
    assert failed["error"] == "takes too much memory to decode; shrink it" and made["error"] is None


@pytest.mark.parametrize(("step", "options"), [("clip", {}), ("info", {"clip_seconds": 2})])
def test_a_job_ends_where_no_process_can_be_started(step, options, llm, tmp_path, monkeypatch):
    def unusable(*args):
        raise WorkersUnusable("worker processes end as soon as they begin: it ended with exit code 3")

    monkeypatch.setattr(ItemLoader, step, unusable)
    with pytest.raises(JobError, match=r"end as soon as they begin: .* code 3; videos need them"):
        next(caption_images(make_clip(tmp_path / "a.mp4"), llm=llm, **options))
