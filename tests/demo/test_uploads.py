"""Uploaded files belong to sessions and are removed when unused; their size is found."""

import asyncio
import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from PIL import ExifTags, Image

from mmvllm.demo import uploads as uploads_module
from mmvllm.demo.images import UploadedImage, UploadError
from mmvllm.demo.parts import FileParts
from mmvllm.demo.uploads import MAX_INCOMING_FILES, ORPHAN_SECONDS, Uploads
from mmvllm.media.policy import MediaPolicy
from mmvllm.processors.images.processor import ImageProcessor
from mmvllm.processors.videos.load import Load
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.hostile import jpeg_with
from tests.helpers.media.images import encode, image_config

POLICY = MediaPolicy(max_bytes=1_000_000, max_pixels=1_000_000)
LOAD = Load(image=POLICY.load)


@pytest.fixture
def uploads(tmp_path) -> Uploads:
    (tmp_path / "up").mkdir()
    return Uploads(tmp_path / "up")


def upload(uploads: Uploads, name: str):
    path = uploads.folder / f"hash-of-{name}" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"picture")
    return path


def test_a_file_is_kept_until_its_last_holder_releases_it(uploads):
    path = upload(uploads, "a.png")
    assert uploads.claim("one", str(path)) == uploads.claim("two", str(path)) == path
    uploads.release("one")
    assert path.exists()
    uploads.release("two")
    assert not path.parent.exists()
    with pytest.raises(ValueError, match=r"a\.png is no longer here; add it again"):
        uploads.claim("one", str(path))
    with pytest.raises(ValueError, match="no longer here"):
        uploads.claim("one", str(path.parent / ("a" * 300)))


def test_a_session_keeps_the_files_that_it_shows(uploads):
    kept, gone = upload(uploads, "a.png"), upload(uploads, "b.png")
    for path in (kept, gone):
        uploads.claim("one", str(path))
    uploads.release("one", keep=[kept])
    assert (kept.exists(), gone.exists()) == (True, False)
    uploads.release("one")
    assert not kept.exists()


def test_only_uploaded_files_can_be_claimed(uploads, tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    link = upload(uploads, "a.png").with_name("link.png")
    link.symlink_to(secret)
    folder_link = uploads.folder / "link"
    folder_link.symlink_to(tmp_path)
    above = uploads.folder / "a.png"
    above.write_bytes(b"incomplete")  # gradio renames it when it is complete
    for path in (
        secret,
        link,
        folder_link / "secret.png",
        above,
        f"{uploads.folder}/{'a/' * 100_000}",
        uploads.folder / ".." / "secret.png",
        "secret.png",
        "/no/such.png",
        "",
        "http://a/b.png",
    ):
        with pytest.raises(ValueError, match="only files that were uploaded here"):
            uploads.claim("one", str(path))
    uploads.release("one")
    assert secret.exists()


def test_folders_of_killed_pages_are_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(uploads_module.atexit, "register", lambda *_, **__: None)
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    killed, running, starting, other = (tmp_path / f"mmvllm-{name}" for name in ("page-a", "page-b", "page-c", "d"))
    for folder in (killed, running, starting, other):
        (folder / "hash").mkdir(parents=True)
        (folder / "hash" / "a.png").write_bytes(b"picture")
        os.utime(folder, None if folder == starting else (0, 0))
    (tmp_path / "mmvllm-page-link").symlink_to(other)
    os.mkfifo(tmp_path / "mmvllm-page-fifo")
    os.utime(tmp_path / "mmvllm-page-fifo", (0, 0))
    lock = uploads_module._locked(running)
    own = uploads_module.process_uploads.__wrapped__()
    assert not killed.exists() and running.exists() and starting.exists() and (other / "hash" / "a.png").exists()
    assert own.folder.parent == tmp_path and uploads_module._locked(own.folder) is None
    os.close(lock)


def test_unclaimed_files_are_removed_after_a_while(uploads):
    old, new, held = (upload(uploads, name) for name in ("old.png", "new.png", "held.png"))
    uploads.claim("one", str(held))
    before = time.time() - ORPHAN_SECONDS - 1
    for path in (old, held):
        os.utime(path, (before, before))
    asyncio.run(uploads.remove_orphans())
    assert (old.parent.exists(), new.exists(), held.exists()) == (False, True, True)


def test_a_file_that_is_claimed_during_the_sweep_is_kept(uploads, monkeypatch):
    path, gone = upload(uploads, "a.png"), upload(uploads, "b.png")
    monkeypatch.setattr(uploads, "_old", lambda: [uploads.claim("one", str(path)), gone])
    shutil.rmtree(gone.parent)  # a session has released it in the meantime
    asyncio.run(uploads.remove_orphans())
    assert path.exists()


def test_files_of_the_page_itself_are_never_removed(uploads):
    path = upload(uploads, "a.png")
    uploads.keep(path)
    uploads.claim("one", str(path))
    uploads.release("one")
    os.utime(path, (0, 0))
    asyncio.run(uploads.remove_orphans())
    assert path.exists()


def parts_of(num_files: int) -> FileParts:
    """An upload of which this many files have begun."""
    parts = FileParts("multipart/form-data; boundary=x", max_files=10_000)
    for number in range(num_files):
        parts.add(b'--x\r\nContent-Disposition: form-data; name="files"; filename="%d"\r\n\r\n\r\n' % number)
    return parts


def has_room(uploads, *incoming: tuple[int, int]) -> bool:
    """Whether uploads of these numbers of bytes, of which these numbers of files have begun, fit together."""
    with ExitStack() as stack:
        for num_bytes, num_files in incoming:
            stack.enter_context(uploads.incoming(num_bytes, parts_of(num_files)))
        return asyncio.run(uploads.has_room())


def test_the_number_of_bytes_is_limited(uploads, monkeypatch):
    monkeypatch.setattr(uploads_module, "MAX_BYTES", 20)
    upload(uploads, "a.png")  # of 7 bytes
    assert has_room(uploads, (13, 1)) and not has_room(uploads, (14, 1))
    assert has_room(uploads, (6, 1), (7, 1)) and not has_room(uploads, (6, 1), (8, 1))


def test_slow_uploads_reserve_little_more_than_has_arrived(uploads, monkeypatch):
    monkeypatch.setattr(uploads_module, "FIRST_BYTES", 10)
    monkeypatch.setattr(uploads_module, "AHEAD_BYTES", 100)
    with uploads.incoming(1000, parts_of(1)) as incoming:
        reserved = [(num, incoming.reserve(num), incoming.num_reserved) for num in (1, 10, 11, 22, 23, 500, 950, 1000)]
    assert [number for number, is_further, _ in reserved if is_further] == [11, 23, 500, 950]
    assert [number for *_, number in reserved] == [10, 10, 22, 22, 46, 600, 1000, 1000]


def test_the_number_of_files_is_limited(uploads, monkeypatch):
    monkeypatch.setattr(uploads_module, "MAX_FILES", 5)
    upload(uploads, "a.png")
    assert has_room(uploads, (1, 4)) and not has_room(uploads, (1, 5))
    assert has_room(uploads, (1, 2), (1, 2)) and not has_room(uploads, (1, 2), (1, 3))


def test_the_number_of_files_that_are_open_is_limited(uploads):
    files = MAX_INCOMING_FILES // 5
    assert has_room(uploads, *[(1, files)] * 5) and not has_room(uploads, *[(1, files)] * 5, (1, 1))
    assert has_room(uploads, (1, MAX_INCOMING_FILES + 1))  # of one question that has as many


def test_the_slowest_upload_ends_where_others_need_its_files(uploads, monkeypatch):
    now = 100.0
    monkeypatch.setattr(uploads_module.time, "monotonic", lambda: now)
    ended = []
    with ExitStack() as stack:
        for name, num_received in (("fast", 10**6), ("slow", 10**4), ("new", 0)):
            now += 1.0
            upload = stack.enter_context(uploads.incoming(10**7, parts_of(MAX_INCOMING_FILES // 2)))
            upload.reserve(num_received)
            upload.timeout = SimpleNamespace(reschedule=lambda _, name=name: ended.append(name))
        assert not uploads.make_room() and ended == []  # none is old enough
        now += 4.5
        assert uploads.make_room() and ended == ["slow"]
        assert uploads.make_room() and ended == ["slow"]  # its files are closed


def test_an_upload_that_ends_while_the_folder_is_scanned_is_counted(uploads, monkeypatch):
    monkeypatch.setattr(uploads_module, "MAX_BYTES", 20)
    with ExitStack() as other:
        other.enter_context(uploads.incoming(15, parts_of(1)))
        monkeypatch.setattr(uploads, "_files", lambda: other.close() or iter(()))  # its files are scanned too early
        assert not has_room(uploads, (6, 1))


def test_uploads_that_have_not_begun_hold_no_files(uploads):
    assert has_room(uploads, *[(1, 0)] * 2 * MAX_INCOMING_FILES, (1, 1))


def test_empty_folders_are_removed(uploads):
    """Gradio makes one for a file whose name it refuses."""
    old, new = uploads.folder / "old", uploads.folder / "new"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (0, 0))
    kept = upload(uploads, "a.png")
    uploads.claim("one", str(kept))
    os.utime(kept.parent, (0, 0))
    asyncio.run(uploads.remove_orphans())
    assert (old.exists(), new.exists(), kept.exists()) == (False, True, True)


@pytest.mark.parametrize("size", [(200, 100), (1000, 30), (28, 28), (640, 480)])
@pytest.mark.parametrize("bounds", [(3136, 1_003_520), (20_000, 40_000), (100_000, 100_000)])
def test_the_tokens_of_an_uploaded_image_are_those_of_the_processor(size, bounds, tmp_path):
    noise_image(*size).save(tmp_path / "a.png")
    found, config = UploadedImage.read(tmp_path / "a.png", LOAD), image_config()
    grid = ImageProcessor(config)(found.load(LOAD), *bounds).grid
    assert found.num_tokens(config, *bounds) == grid[1] * grid[2] // 4


@pytest.mark.parametrize(
    "data, message",
    [
        (b"text", r"a\.png: not an image in PNG, JPEG"),
        (encode(Image.new("L", (1001, 1000))), r"a\.png: too large to decode \(it is 1001x1000, more than 1000000"),
        (encode(Image.new("L", (100, 100)))[:60], r"a\.png: cannot be decoded, damaged or truncated"),
        (jpeg_with(b"\xff\xe1\x00\x0aExif\0\0\0\0" * 2000), r"a\.png: is a JPEG with more than 1,024 segments"),
        (bytes(1_000_001), r"a\.png: the image of 1000001 bytes: too large; at most 1000000 bytes are accepted"),
    ],
)
def test_a_bad_file_is_named(data, message, tmp_path):
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(UploadError, match=message):
        UploadedImage.read(tmp_path / "a.png", LOAD)


def test_a_file_that_has_gone_is_named(tmp_path):
    with pytest.raises(UploadError, match=r"a\.png cannot be read; remove it, or add it again"):
        UploadedImage.read(tmp_path / "a.png", LOAD)


@pytest.mark.parametrize("turned", [False, True])
def test_the_size_is_that_of_the_upright_image(turned, tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6 if turned else 1
    noise_image(640, 480).save(tmp_path / "a.jpg", exif=exif)
    found = UploadedImage.read(tmp_path / "a.jpg", LOAD)
    assert (found.width, found.height) == ((480, 640) if turned else (640, 480))


def test_uploads_that_begin_together_share_the_scan_of_the_folder(uploads, monkeypatch):
    upload(uploads, "a.png")
    scans, real = [], uploads._files
    monkeypatch.setattr(uploads, "_files", lambda: scans.append(None) or real())

    async def begin(number: int) -> list[bool]:
        return await asyncio.gather(*(uploads.has_room() for _ in range(number)))

    async def visit():
        first = asyncio.create_task(begin(1))
        await asyncio.sleep(0)
        gone = [asyncio.create_task(uploads.has_room()) for _ in range(5)]
        others = asyncio.create_task(begin(100))
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        return await first + await others

    assert all(asyncio.run(visit())) and len(scans) == 2
    assert asyncio.run(uploads.has_room()) and len(scans) == 3  # of another event loop


def test_a_scan_that_is_shared_begins_after_the_upload(uploads, monkeypatch):
    """What was complete before an upload begins is counted."""
    monkeypatch.setattr(uploads_module, "MAX_FILES", 2)

    async def visit():
        waits = asyncio.create_task(uploads.has_room())
        await asyncio.sleep(0.001)
        for name in ("a.png", "b.png", "c.png"):
            upload(uploads, name)
        assert not await uploads.has_room()
        await waits

    asyncio.run(visit())


def test_a_scan_that_ends_with_its_event_loop_keeps_no_later_upload_waiting(uploads):
    async def ends():
        tasks = [asyncio.create_task(uploads.has_room())]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(uploads.has_room()))
        await asyncio.sleep(0.02)

    asyncio.run(ends())
    assert asyncio.run(uploads.has_room())
