"""Images that are given as arrays or as binary file objects."""

import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmvllm.errors import ImageError
from mmvllm.processors.images.load import load_image
from tests.helpers.media.images import PNG, RGB, noise
from tests.helpers.media.loading import levels

GREY, RGBA = noise(13, 7, 1, seed=1)[:, :, 0], noise(13, 7, 4, seed=2)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("pixels", [RGB, GREY, RGBA], ids=["RGB", "grey", "RGBA"])
def test_arrays_of_8_bits_are_loaded_like_pil_images(pixels, make):
    assert np.array_equal(levels(make(pixels)), levels(Image.fromarray(pixels)))


def test_an_array_that_is_not_contiguous_is_loaded():
    assert np.array_equal(levels(noise(26, 14)[::2, ::-2]), noise(26, 14)[::2, ::-2])


def test_the_loaded_image_does_not_share_memory_with_the_array():
    pixels = RGB.copy()
    loaded = load_image(pixels)
    pixels[:] = 0
    assert np.array_equal(np.asarray(loaded), RGB)


@pytest.mark.parametrize(
    ("array", "given"),
    [
        (RGB.astype(np.float32), r"shape \(7, 13, 3\) and dtype float32"),
        (RGB.transpose(2, 0, 1), r"shape \(3, 7, 13\) and dtype uint8"),
        (RGB[None], r"shape \(1, 7, 13, 3\) and dtype uint8"),
        (RGB[:, :, :2], r"shape \(7, 13, 2\) and dtype uint8"),
        (RGB[0, 0], r"shape \(3,\) and dtype uint8"),
        (np.array(RGB, dtype=object), r"shape \(7, 13, 3\) and dtype object"),
        (torch.zeros(7, 13, 3, dtype=torch.bfloat16), r"shape \(7, 13, 3\) and dtype bfloat16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_arrays_are_refused_with_shape_and_dtype(array, given):
    with pytest.raises(ImageError, match=rf"^the array: must be uint8 of shape \(height, width, 3\).*, got {given}"):
        load_image(array)


def test_an_array_without_pixels_is_named():
    with pytest.raises(ImageError, match=r"^the array: has no pixels, it is 0x5$"):
        load_image(np.zeros((5, 0, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "plain.png").write_bytes(PNG)
    return tmp_path


def open_temporary(folder: Path):
    file = tempfile.NamedTemporaryFile(dir=folder)  # noqa: SIM115
    file.write(PNG)
    return file


FILE_OBJECTS = {
    "BytesIO": lambda folder: io.BytesIO(PNG),
    "BytesIO at its end": lambda folder: (file := io.BytesIO(PNG), file.seek(0, io.SEEK_END))[0],
    "file": lambda folder: (folder / "plain.png").open("rb"),
    "unbuffered": lambda folder: (folder / "plain.png").open("rb", buffering=0),
    "temporary": open_temporary,
}


@pytest.mark.parametrize("kind", FILE_OBJECTS)
def test_a_binary_file_object_may_be_loaded_repeatedly(kind, folder):
    with FILE_OBJECTS[kind](folder) as file:
        assert np.array_equal(levels(file), RGB)
        assert np.array_equal(levels(file), RGB)


def test_invalid_file_objects_are_named(folder):
    with pytest.raises(ImageError, match=r"^the file object: gives str instead of bytes; open it in binary mode$"):
        load_image(io.StringIO("text"))
    with (
        (folder / "new.png").open("wb") as file,
        pytest.raises(ImageError, match=r"^the file object: cannot be read \("),
    ):
        load_image(file)
    with pytest.raises(ImageError, match=r"^the file object: cannot be read \(I/O operation on closed file"):
        load_image(file)
    with pytest.raises(ImageError, match=r"^the image in the file object: is empty \(0 bytes\)$"):
        load_image(io.BytesIO())
    with pytest.raises(ImageError, match=r"^the image in the file object: not an image that Pillow can read$"):
        load_image(io.BytesIO(b"text"))
