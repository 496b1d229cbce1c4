"""JPEGs that lack only their end marker are read; those that lack rows are refused, unless the caller accepts them."""

import random

import numpy as np
import pytest
from PIL import Image

from mmvllm.errors import ImageError
from mmvllm.processors.images.decode import is_truncated
from mmvllm.processors.images.draft import Draft, source_size
from mmvllm.processors.images.load import load_image
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import encode
from tests.helpers.media.loading import exif, rotated

KINDS = {
    "baseline": {},
    "progressive": {"progressive": True},
    "full color": {"subsampling": 0},
    "a restart marker after each unit": {"restart_marker_blocks": 1},
    "restart markers in rows": {"restart_marker_rows": 1},
    "progressive with restart markers": {"progressive": True, "restart_marker_blocks": 3},
    "optimized tables": {"optimize": True, "quality": 40},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_mode = pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
SIZES = [(60, 40), (64, 64), (131, 77)]


def jpeg(kind: str, mode: str, size: tuple[int, int]) -> bytes:
    return encode(noise_image(*size, seed=2).convert(mode), "JPEG", **KINDS[kind])


@every_kind
@every_mode
def test_a_jpeg_without_its_end_marker_is_whole(kind, mode):
    for size in SIZES:
        data = jpeg(kind, mode, size)
        expected = load_image(data)
        for cut in (data[:-2], data[:-1], data[:-2] + b"\xff"):
            image = load_image(cut)
            assert image.tobytes() == expected.tobytes() and not is_truncated(image)


@every_kind
@every_mode
def test_a_jpeg_that_lacks_rows_is_refused_unless_that_is_accepted(kind, mode):
    chance = random.Random(0)
    for size in SIZES:
        data = jpeg(kind, mode, size)
        whole = load_image(data).tobytes()
        for missing in [*range(3, 12), *(chance.randrange(12, len(data)) for _ in range(20))]:
            cut = data[:-missing]
            try:
                image = load_image(cut)
            except ImageError:
                pass
            else:
                assert image.tobytes() == whole, "the missing bytes had no pixel's last bit"


@every_kind
def test_missing_rows_that_are_accepted_are_the_last_ones(kind):
    image = Image.fromarray(np.tile(np.arange(0, 128, dtype=np.uint8)[:, None], (1, 128)))
    data = encode(image, "JPEG", **KINDS[kind] | {"progressive": False})
    cut = data[: len(data) * 3 // 4]
    with pytest.raises(ImageError, match="damaged or truncated"):
        load_image(cut)
    found = load_image(cut, accept_truncated=True)
    assert is_truncated(found) and found.size == image.size
    differs = np.flatnonzero((np.asarray(found) != np.asarray(load_image(data))).any((1, 2)))
    assert 0 < len(differs) <= 64 <= differs[0]


def test_a_progressive_jpeg_without_its_last_scans_is_truncated():
    data = jpeg("progressive", "RGB", (60, 40))
    start = data.rindex(b"\xff\xda")
    before = data.rindex(b"\xff\xc4", 0, start) if b"\xff\xc4" in data[start - 400 : start] else start
    for end in (start, before):
        with pytest.raises(ImageError, match="damaged or truncated"):
            load_image(data[:end])
        assert is_truncated(load_image(data[:end], accept_truncated=True))


def test_drafts_and_orientation_are_those_of_the_whole_file():
    data = encode(noise_image(640, 480), "JPEG", exif=exif(rotated(6)))
    draft = Draft(max_pixels=320 * 240, min_side=28)
    whole, cut = load_image(data, draft), load_image(data[:-2], draft)
    assert whole.tobytes() == cut.tobytes() and cut.size == (240, 320) and source_size(cut) == (480, 640)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "TIFF"])
def test_other_formats_that_lack_data_are_refused(format):
    data = encode(noise_image(60, 40), format)
    for accept_truncated in (False, True):
        with pytest.raises(ImageError, match="damaged or truncated"):
            load_image(data[: len(data) // 2], accept_truncated=accept_truncated)


def test_a_jpeg_without_a_scan_is_refused():
    data = jpeg("baseline", "RGB", (60, 40))
    for end in (2, 20, 200, data.index(b"\xff\xda"), data.index(b"\xff\xda") + 14):
        with pytest.raises(ImageError):
            load_image(data[:end])
