"""What a job loads, and the processes that decode its videos, whose memory and crashes do not reach the job."""

import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from mmvllm import LLM
from mmvllm.captioning import JobError, caption_images
from mmvllm.captioning.sources import loading
from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.loading import ItemLoader, LoaderInWorker
from mmvllm.captioning.sources.names import SUFFIXES
from mmvllm.captioning.sources.timeouts import Timeouts
from mmvllm.config import MiB
from mmvllm.errors import ImageError
from mmvllm.media.decoding import VIDEO_BYTES, MediaDecoder
from mmvllm.media.policy import MediaPolicy
from mmvllm.processes.pool import WorkerPool, WorkersUnusable
from mmvllm.processors.budget import DecodeBudget
from mmvllm.processors.images.load import load_image
from tests.helpers.engine.requests import noise_image
from tests.helpers.media import tasks
from tests.helpers.media.hostile import jpeg_2000_of_tiles, run_length_bitmap, tiff_of_shared_strips
from tests.helpers.media.images import encode
from tests.helpers.media.videos import FramesAt, declare_seconds, make_clip
from tests.helpers.serving.server import ENGINE


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


TAKE_GIGABYTES = {"JPEG 2000": jpeg_2000_of_tiles, "BMP": lambda: run_length_bitmap(80_000_000, 2, jump=40)}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
@pytest.mark.parametrize("kind", TAKE_GIGABYTES)
def test_an_image_that_takes_gigabytes(kind, tmp_path):
    good, hostile = tmp_path / "good.png", tmp_path / "hostile.png"  # names do not matter
    good.write_bytes(encode(noise_image(300, 200), "JPEG2000"))
    hostile.write_bytes(TAKE_GIGABYTES[kind]())
    with closing(job()) as loader:
        for _ in range(2):
            image = loader.image(Item("good.png", "", str(good)))
            assert image.tobytes() == load_image(good).tobytes()
            before = peak(loader._pool)
            with pytest.raises(ValueError):
                loader.image(Item("hostile.png", "", str(hostile)))
        assert peak(loader._pool) - before < VIDEO_BYTES + 200 * MiB  # 4.7 and 3.2 GB without a limit


ENDLESS = {
    "a.ppm": lambda: b"P3 8 8 255\n" + b"#\n" * 10_000_000,  # takes two minutes
    "a.tif": lambda: tiff_of_shared_strips(150_000),  # takes seven
}


@pytest.mark.spawns
@pytest.mark.parametrize("name", ENDLESS)
def test_an_image_that_takes_too_long_leaves_no_thread_behind(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(ENDLESS[name]())
    before = {*threading.enumerate()}
    with (
        closing(ItemLoader(Timeouts(image=2.0), num_workers=1)) as loader,
        pytest.raises(ValueError, match="took longer than 2 s to load"),
    ):
        loader.image(Item(name, "", str(path)))
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name == "mmvllm-limited"]


@pytest.mark.spawns
def test_large_files_are_decoded_where_the_decoder_can_be_killed(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    Image.new("RGB", (30, 20)).save(path)
    path.write_bytes(path.read_bytes() + bytes(1000))
    monkeypatch.setattr(loading, "MAX_THREAD_BYTES", 1000)
    monkeypatch.setattr(loading, "load_image", None)  # in threads; a process imports its own
    with closing(job()) as loader:
        assert loader.image(Item("a.png", "", str(path))).size == (30, 20)


@pytest.mark.parametrize("file_format", ["ICNS", "ICO", "PCX", "SGI"])
@pytest.mark.parametrize("loader", [job, LoaderInWorker])
def test_threads_take_common_formats_only(file_format, loader, tmp_path):
    """Others have decoders that take far more time or memory than the size of an image suggests, whatever its name."""
    path = tmp_path / "a.png"
    path.write_bytes(encode(Image.new("RGB", (64, 64)), file_format))
    with pytest.raises(ImageError, match="not an image in AVIF, BMP, DIB, GIF, "):
        loader().image(Item("a.png", "", str(path)))


@pytest.mark.parametrize("suffix", sorted(SUFFIXES - {".apng", ".heic", ".heif", ".hif", ".jxl", ".mpo"}))
def test_every_suffix_has_its_format(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    try:
        Image.new("L" if suffix == ".pgm" else "1" if suffix == ".pbm" else "RGB", (30, 20)).save(path)
    except (ValueError, OSError, KeyError):
        pytest.skip("Pillow does not write it here")
    assert LoaderInWorker().image(Item(path.name, "", str(path))).size == (30, 20)


def test_large_files_are_read_one_after_the_other(tmp_path, monkeypatch):
    """Their bytes are held until they have been decoded, or refused."""
    monkeypatch.setattr(loading, "ENCODED", DecodeBudget(100))
    counting, most, held = threading.Lock(), 0, 0

    def load(source, *_, **__):
        nonlocal most, held
        with counting:
            held += len(Path(source).read_bytes())
            most = max(most, held)
        time.sleep(0.01)
        with counting:
            held -= 60
        raise ImageError(source, "is empty")

    monkeypatch.setattr(loading, "load_image", load)
    items = [Item(name, "", str(tmp_path / name)) for name in "abcd"]
    for item in items:
        item.file.write_bytes(bytes(60))

    def fails(item: Item) -> bool:
        with pytest.raises(ImageError):
            job().image(item)
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(fails, items))
    assert most == 60


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
