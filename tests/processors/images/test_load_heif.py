"""HEIC and HEIF are read with the extra `heif`, turned upright once; without it the message says what to install."""

from pathlib import Path

import numpy as np
import pytest
from pillow_heif import register_heif_opener

from mmvllm.captioning.sources.find import find_items
from mmvllm.demo.images import UploadedImage, UploadError
from mmvllm.errors import ImageError
from mmvllm.media.policy import MediaPolicy
from mmvllm.processors.images.load import load_image
from mmvllm.processors.videos.load import DIRECT, Load
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import encode
from tests.helpers.media.loading import UPRIGHT, exif, levels, rotated, without_plugin


def heif(orientation: int = 1, mode: str = "RGB", **options) -> bytes:
    """A file as phones write it: both the container's transformation and EXIF say how the image is turned."""
    register_heif_opener()
    image = noise_image(96, 64, seed=3).convert(mode)
    image.info["exif"] = exif(rotated(orientation))
    return encode(image, "HEIF", quality=95, **options)


def distance(image: np.ndarray, other: np.ndarray) -> float:
    return np.abs(image.astype(int) - other).mean()


@pytest.fixture
def without_package():
    with without_plugin("pillow_heif", "HEIF"):
        yield


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_an_image_is_turned_once(orientation):
    loaded = levels(heif(orientation))
    expected = UPRIGHT[orientation](np.asarray(noise_image(96, 64, seed=3)))
    assert loaded.shape == expected.shape
    assert distance(loaded, expected) < 4


def test_server_and_page_accept_it(tmp_path):
    path = tmp_path / "a.heic"
    path.write_bytes(heif(6))
    assert MediaPolicy().load(path.read_bytes()).size == (64, 96)
    load = Load(image=MediaPolicy().load)
    uploaded = UploadedImage.read(path, load)
    assert (uploaded.width, uploaded.height) == uploaded.load(load).size == (64, 96)


def test_captioning_finds_it(tmp_path):
    for name in ("a.heic", "b.HEIF", "c.hif", "d.txt"):
        (tmp_path / name).write_bytes(heif())
    assert [Path(item.path).name for item in find_items([tmp_path])] == ["a.heic", "b.HEIF", "c.hif"]


def test_a_damaged_image_is_an_image_error():
    data = heif()
    for end in range(12, len(data), 97):
        with pytest.raises(ImageError):
            load_image(data[:end])


@pytest.mark.parametrize("brand", [b"heic", b"hevc", b"mif1"])
def test_what_cannot_be_opened_is_not_called_a_video(brand):
    with pytest.raises(ImageError, match=r"not an image that Pillow can read$"):
        load_image(b"\0\0\0\x18ftyp" + brand + bytes(12))


def test_without_the_package_the_extra_is_named(without_package, tmp_path):
    path = tmp_path / "a.heic"
    path.write_bytes(b"\0\0\0\x1cftypheix\0\0\0\0mif1heixmiaf")
    for load in (load_image, lambda path: MediaPolicy().load(path.read_bytes())):
        with pytest.raises(ImageError) as raised:
            load(path)
        assert raised.value.reason == "is HEIC/HEIF; pip install 'mmvllm[heif]'"
    with pytest.raises(UploadError, match=r"a\.heic: is HEIC/HEIF; pip install 'mmvllm\[heif\]'"):
        UploadedImage.read(path, DIRECT)


def test_without_the_package_other_files_are_not_called_heif(without_package):
    for data, formats in ((b"\0\0\0\x1cftypmp42", None), (b"\0\0\0\x1cftypheic", ("PNG", "JPEG"))):
        with pytest.raises(ImageError, match=r": not an image"):
            load_image(data, formats=formats)
