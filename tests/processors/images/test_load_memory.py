"""Failed images leave nothing behind, and images that are decoded at once share a budget of memory."""

import gc
import io
import re
import struct
import threading
import time
import types
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from PIL import Image

from mmvllm.errors import ImageError
from mmvllm.processors.budget import DecodeBudget
from mmvllm.processors.images import decode
from mmvllm.processors.images.draft import Draft
from mmvllm.processors.images.load import DECODING, load_image
from tests.helpers.media.hostile import truncated_blp, truncated_png
from tests.helpers.media.images import PNG, encode, noise

pytestmark = pytest.mark.slow

MB = 1_000_000
LARGE = {"PNG": lambda: truncated_png(8000, 8000), "BLP": lambda: truncated_blp(8000, 8000)}


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def failed(source, **options) -> ImageError:
    with pytest.raises(ImageError) as raised:
        load_image(source, **options)
    return raised.value


@pytest.mark.parametrize("kind", LARGE)
def test_stored_errors_of_large_images_hold_no_memory(kind, no_gc):
    data = LARGE[kind]()
    assert len(data) < 3000
    failed(data)
    before = psutil.Process().memory_info().rss
    errors = [failed(data) for _ in range(10)]  # each image has 256 MB
    assert psutil.Process().memory_info().rss - before < 100 * MB
    assert all("cannot be decoded, damaged or truncated" in str(error) for error in errors)


@pytest.mark.parametrize(
    "source", [truncated_png(300, 200), b"hello", PNG[:20], noise(3, 3)[None], "data:,a"], ids=repr
)
def test_an_error_holds_no_other_error_and_nothing_of_the_image(source, no_gc):
    error = failed(source)
    assert error.__context__ is None
    assert error.__cause__ is None
    traceback = error.__traceback__.tb_next.tb_next  # after the frames of this test
    held = [value for value in _locals(traceback) if isinstance(value, Image.Image | bytes | np.ndarray | Exception)]
    assert held == []


def _locals(traceback: types.TracebackType | None) -> list:
    values = []
    while traceback is not None:
        values += traceback.tb_frame.f_locals.values()
        traceback = traceback.tb_next
    return values


def test_the_callers_image_is_not_closed_when_it_fails():
    image = Image.open(io.BytesIO(truncated_png(300, 200)))
    failed(image)
    assert image.fp is not None


@pytest.mark.parametrize(
    "error, message",
    [
        (MemoryError(), "not enough memory to decode it: 13x7 pixels need about 1 MB; shrink it first"),
        (RecursionError("too deep"), r"cannot be decoded, damaged or truncated \(RecursionError: too deep\)"),
        (KeyError(7), r"cannot be decoded, damaged or truncated \(KeyError: 7\)"),
        (SyntaxError("broken"), r"cannot be decoded, damaged or truncated \(broken\)"),
        (AssertionError(), r"cannot be decoded, damaged or truncated \(AssertionError\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_whatever_a_reader_raises_becomes_a_sentence(error, message, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    for source in (PNG, Image.open(io.BytesIO(PNG))):
        raised = failed(source)
        assert raised.__context__ is None
        assert re.search(f": {message}$", str(raised))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_running_out_of_memory_says_how_much_is_needed(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load_prepare", fail)
    reason = "not enough memory to decode it: 13000x13000 pixels need about 2,028 MB; shrink it first"
    assert failed(truncated_png(13000, 13000)).reason == reason


def test_a_file_that_does_not_fit_into_memory_is_named(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def read(self, *_):
            raise MemoryError

    (tmp_path / "a.png").write_bytes(PNG)
    monkeypatch.setattr("mmvllm.processors.images.load.open", lambda *_: Full(), raising=False)
    assert failed(tmp_path / "a.png").reason == f"not enough memory to read its {len(PNG)} bytes"


# The budget


def test_a_budget_lets_in_what_fits():
    budget = DecodeBudget(10)
    with budget.reserve(6), budget.reserve(4):
        assert budget.in_use == 10
    assert budget.in_use == 0


def test_an_image_larger_than_the_budget_is_admitted_alone():
    budget, order = DecodeBudget(10), []
    threads = []
    with budget.reserve(25):
        for num_waiting, size in enumerate((1, 30, 2), start=1):
            threads.append(threading.Thread(target=_enter, args=(budget, size, order)))
            threads[-1].start()
            _wait_for(lambda num_waiting=num_waiting: len(budget._waiting) == num_waiting)
        assert order == []
    for thread in threads:
        thread.join(5)
    assert order == [1, 30, 2]  # in the order of arrival: the large one is not overtaken for ever
    assert budget.in_use == 0


def _enter(budget: DecodeBudget, size: int, order: list[int]) -> None:
    with budget.reserve(size):
        order.append(size)


def _wait_for(is_true, seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_bytes_are_released_when_decoding_fails():
    for _ in range(3):
        failed(truncated_png(8000, 8000))
        failed(Image.open(io.BytesIO(truncated_png(300, 200))))
    assert DECODING.in_use == 0


def test_large_images_are_decoded_one_after_the_other(monkeypatch):
    budget, peaks = DecodeBudget(100 * MB), []
    decoded = decode.upright_rgb

    def watched(*args):
        peaks.append(budget.in_use)
        return decoded(*args)

    monkeypatch.setattr(decode, "upright_rgb", watched)
    data = encode(Image.new("L", (4000, 4000)))  # 96 MB by the estimate
    threads = [threading.Thread(target=load_image, args=(data,), kwargs={"reserve": budget.reserve}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert peaks == [96 * MB] * 3


ESTIMATES = {
    "grey": (6, lambda: encode(Image.new("L", (100, 100)))),
    "RGB": (8, lambda: encode(Image.new("RGB", (100, 100)))),
    "RGBA": (12, lambda: encode(Image.new("RGBA", (100, 100)))),
    "grey with alpha": (16, lambda: encode(Image.new("LA", (100, 100)))),
    "16 bits": (9, lambda: encode(Image.new("I;16", (100, 100)))),
    "float": (17, lambda: encode(Image.new("F", (100, 100)), "TIFF")),
    "WEBP": (16, lambda: encode(Image.new("RGB", (100, 100)), "WEBP")),
    "progressive JPEG": (14, lambda: encode(Image.new("RGB", (100, 100)), "JPEG", progressive=True)),
    "PIL": (8, lambda: Image.new("RGB", (100, 100))),
    "array": (8, lambda: noise(100, 100)),
    "icon that declares 16x16": (12, lambda: _icon(encode(Image.new("RGBA", (100, 100))))),
}


@pytest.mark.filterwarnings("ignore:Image was not the expected size")
@pytest.mark.parametrize("kind", ESTIMATES)
def test_memory_is_estimated_by_mode_and_format(kind):
    per_pixel, make = ESTIMATES[kind]
    assert reserved(make()) == per_pixel * 100 * 100


def test_a_draft_takes_less_memory():
    assert reserved(encode(Image.new("RGB", (800, 800)), "JPEG"), draft=Draft(100 * 100, 1)) == 8 * 100 * 100


def reserved(source, **options) -> int:
    """The bytes for which loading an image asks."""
    seen = []

    @contextmanager
    def reserve(num_bytes: int):
        seen.append(num_bytes)
        yield

    load_image(source, reserve=reserve, **options)
    assert len(seen) == 1
    return seen[0]


def _icon(png: bytes) -> bytes:
    entry = bytes([16, 16, 0, 0, 1, 0, 32, 0]) + len(png).to_bytes(4, "little") + (22).to_bytes(4, "little")
    return b"\0\0\1\0\1\0" + entry + png


def test_an_icon_is_as_large_as_the_image_inside():
    with pytest.raises(ImageError, match=r"too large to decode \(it is 100x100, more than 9999 pixels\)"):
        load_image(_icon(encode(Image.new("RGBA", (100, 100)))), max_source_pixels=9999)


@pytest.mark.parametrize("mode", ["L", "P", "RGB", "RGBA", "CMYK", "LA", "I;16", "F"])
def test_the_estimate_is_not_below_the_memory_that_is_used(mode):
    file_format = "TIFF" if mode in ("CMYK", "F") else "PNG"
    data = encode(Image.new(mode, (3000, 3000)), file_format)
    num_bytes = reserved(data)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins again
    before = psutil.Process().memory_info().rss
    image = load_image(data)
    assert _peak() - before < num_bytes * 1.1 + 5 * MB
    assert image.size == (3000, 3000)


def _peak() -> int:
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_a_bitmap_inside_an_icon_is_checked_before_it_is_opened():
    bitmap = struct.pack("<IiiHHIIiiII", 40, 9000, 18000, 1, 32, 0, 0, 0, 0, 0, 0)
    with pytest.raises(ImageError, match="too large to decode"):
        load_image(_icon(bitmap), max_source_pixels=9999)
