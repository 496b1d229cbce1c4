"""JPEG XL is read with the extra `jxl`; without it the message says what to install."""

import numpy as np
import pytest
from PIL import Image

from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.loading import ItemLoader
from mmvllm.captioning.sources.names import FORMATS, is_media_name
from mmvllm.errors import ImageError
from mmvllm.processors.images import decode
from mmvllm.processors.images.load import load_image
from mmvllm.processors.images.scan import needs_limits
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import encode
from tests.helpers.media.loading import exif, rotated, without_plugin

IMAGE = noise_image(96, 64, seed=3)


def jxl(image: Image.Image = IMAGE, **options) -> bytes:
    decode.readable_formats()  # registers the format
    return encode(image, "JXL", **{"lossless": True} | options)


@pytest.fixture
def without_package():
    with without_plugin("pillow_jxl", "JXL"):
        yield


@pytest.mark.parametrize("container", [False, True])
def test_an_image_is_read(container):
    data = jxl(use_container=container)
    assert load_image(data).tobytes() == IMAGE.tobytes()
    assert needs_limits(data)


def test_alpha_is_laid_over_white_and_gray_is_read():
    alpha = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert load_image(jxl(alpha)).getpixel((0, 0)) == (255, 255, 255)
    gray = IMAGE.convert("L")
    assert load_image(jxl(gray)).tobytes() == gray.convert("RGB").tobytes()


def test_exif_does_not_turn_an_image_which_its_header_has_turned():
    assert load_image(jxl(exif=exif(rotated(6)))).tobytes() == IMAGE.tobytes()


def test_a_repacked_jpeg_is_turned_by_its_exif(tmp_path):
    """The file has the data of the JPEG, whose EXIF block says how it is turned."""
    path = tmp_path / "a.jpg"
    path.write_bytes(encode(IMAGE, "JPEG", exif=exif(rotated(6))))
    with Image.open(path) as image:
        data = jxl(image, lossless_jpeg=True)
    assert load_image(data).size == (64, 96)
    difference = np.asarray(load_image(data)).astype(int) - np.asarray(load_image(path))
    assert np.abs(difference).max() <= 2


@pytest.mark.spawns
def test_captioning_reads_it_in_a_process_with_limits(tmp_path):
    path = tmp_path / "a.jxl"
    path.write_bytes(jxl())
    assert is_media_name(path.name)
    loader = ItemLoader(num_workers=1)
    try:
        assert loader.image(Item(path.name, "", str(path))).tobytes() == IMAGE.tobytes()
    finally:
        loader.close()


@pytest.mark.parametrize("container", [False, True])
def test_without_the_package_the_message_names_it(container, without_package):
    data = {False: b"\xff\n" + bytes(99), True: b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(99)}[container]
    for formats in (None, FORMATS):
        with pytest.raises(ImageError) as raised:
            load_image(data, formats=formats)
        assert raised.value.reason == "is JPEG XL; pip install 'mmvllm[jxl]'"
    with pytest.raises(ImageError, match="not an image in PNG"):
        load_image(data, formats=["PNG"])


@pytest.mark.parametrize("length", [2, 12, 40, 200])
def test_a_damaged_file_is_refused(length):
    with pytest.raises(ImageError):
        load_image(jxl()[:length])
