"""EXIF rotation, transparency, bit depth, colour modes, drafts and animations give the expected 8-bit RGB pixels."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image, ImageSequence

from mmvllm.processors.images.draft import Draft
from mmvllm.processors.images.load import load_image
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import RGB, encode, noise
from tests.helpers.media.loading import UPRIGHT, exif, levels, png, rotated


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "TIFF", "JPEG"])
def test_exif_rotation_is_applied_once(file_format, orientation, tmp_path):
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(file_format, {})
    block = Image.Exif()
    block[0x0112] = orientation
    stored = Image.fromarray(RGB)
    plain = levels(encode(stored, file_format, **options))
    turned = encode(stored, file_format, exif=block, **options)
    assert np.array_equal(levels(turned), UPRIGHT[orientation](plain))
    lazy = Image.open(io.BytesIO(turned))
    for _ in range(2):
        assert np.array_equal(levels(lazy), UPRIGHT[orientation](plain))


@pytest.mark.filterwarnings("ignore:Truncated File Read")
@pytest.mark.parametrize("tag", [(0x0100, 2, b"abc\0"), (0x011A, 7, b"abc\0"), (0x0102, 4, b"\xff\xff\xff\xff")])
def test_an_image_with_other_damage_in_exif_is_loaded(tag):
    stored = Image.fromarray(RGB)
    loaded = levels(encode(stored, "JPEG", exif=exif(rotated(6), tag)))
    assert np.array_equal(loaded, UPRIGHT[6](levels(encode(stored, "JPEG"))))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "block", [b"Exif\0\0", b"Exif\0\0garbage", b"Exif\0\0II*\0", exif(rotated(0)), exif(rotated(9))]
)
def test_without_a_valid_orientation_the_image_is_not_rotated(block):
    stored = Image.fromarray(RGB)
    assert np.array_equal(levels(encode(stored, "JPEG", exif=block)), levels(encode(stored, "JPEG")))


def over_white(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """What pasting on white with the alpha as mask gives, as in qwen-vl-utils."""
    white = Image.new("RGB", alpha.shape[::-1], (255, 255, 255))
    white.paste(Image.fromarray(rgb.astype(np.uint8)), mask=Image.fromarray(alpha.astype(np.uint8)))
    return np.asarray(white)


GREY, ALPHA = noise(13, 7, 1, seed=1)[:, :, 0], noise(13, 7, 1, seed=2)[:, :, 0]
GREYS = np.repeat(GREY[:, :, None], 3, axis=2)
RGBA = np.dstack([RGB, ALPHA])


@pytest.mark.parametrize("file_format", ["PIL", "PNG", "TIFF", "WEBP"])
def test_alpha_is_laid_over_white(file_format):
    image = Image.fromarray(RGBA)
    source = image if file_format == "PIL" else encode(image, file_format, lossless=True, exact=True)
    assert np.array_equal(levels(source), over_white(RGB, ALPHA))


@pytest.mark.parametrize("as_file", [False, True], ids=["PIL", "PNG"])
def test_grey_with_alpha_is_laid_over_white(as_file):
    image = Image.fromarray(np.dstack([GREY, ALPHA]))
    assert image.mode == "LA"
    assert np.array_equal(levels(encode(image) if as_file else image), over_white(GREYS, ALPHA))


def test_a_palette_with_alpha_is_laid_over_white():
    palette = noise(1, 256, 3, seed=3)[:, 0]
    image = Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(ALPHA)])
    image = Image.merge("PA", image.split())
    image.putpalette(palette.tobytes())
    assert np.array_equal(levels(image), over_white(palette[GREY], ALPHA))


@pytest.mark.parametrize("form", ["PIL", "PNG", "GIF"])
def test_a_transparent_palette_entry_becomes_white(form):
    palette = noise(1, 256, 3, seed=3)[:, 0]
    image = Image.fromarray(GREY).convert("P")
    image.putpalette(palette.tobytes())
    image.info["transparency"] = 9
    image.putpixel((2, 3), 9)
    indices = np.asarray(image)
    source = image if form == "PIL" else encode(image, form, transparency=9, optimize=False)
    assert (levels(source)[3, 2] == 255).all()
    assert np.array_equal(levels(source), over_white(palette[indices], np.where(indices == 9, 0, 255)))


def test_palette_entries_may_be_half_transparent():
    palette, alphas = noise(1, 256, 3, seed=3)[:, 0], noise(1, 256, 1, seed=4)[:, 0, 0]
    image = Image.fromarray(GREY).convert("P")
    image.putpalette(palette.tobytes())
    assert np.array_equal(levels(encode(image, transparency=alphas.tobytes())), over_white(palette[GREY], alphas[GREY]))


@pytest.mark.parametrize("colour", [(10, 20, 30), 7], ids=["RGB", "grey"])
def test_a_transparent_colour_becomes_white(colour):
    stored = np.array(GREY if colour == 7 else RGB)
    stored[stored == 7] = 8
    stored[2, 5] = stored[6, 1] = colour
    want = np.array(Image.fromarray(stored).convert("RGB"))
    want[2, 5] = want[6, 1] = 255
    assert np.array_equal(levels(encode(Image.fromarray(stored), transparency=colour)), want)


DEEP = np.random.default_rng(5).integers(0, 65536, (7, 13, 4)).astype(np.uint16)


@pytest.mark.parametrize("top", [65535, 300, 255, 0])
def test_16_bit_grey_is_scaled_however_dark_it_is(top):
    stored = np.minimum(DEEP[:, :, 0], top)
    want = np.repeat((stored // 256).astype(np.uint8)[:, :, None], 3, axis=2)
    assert np.array_equal(levels(png(13, 7, 16, 0, stored.astype(">u2").tobytes())), want)
    assert np.array_equal(levels(Image.fromarray(stored)), want)
    assert np.array_equal(levels(encode(Image.fromarray(stored), "TIFF")), want)


def test_16_bit_colours_are_scaled():
    stored = DEEP[:, :, :3]
    assert np.array_equal(levels(png(13, 7, 16, 2, stored.astype(">u2").tobytes())), stored // 256)


def test_16_bit_alpha_is_laid_over_white():
    want = over_white(DEEP[:, :, :3] // 256, DEEP[:, :, 3] // 256)
    assert np.array_equal(levels(png(13, 7, 16, 6, DEEP.astype(">u2").tobytes())), want)


@pytest.mark.parametrize("as_file", [False, True], ids=["PIL", "TIFF"])
@pytest.mark.parametrize(
    "dtype, white", [(np.int32, 255), (np.int32, 65535), (np.float32, 1), (np.float32, 255), (np.float32, 65535)]
)
def test_32_bit_grey_keeps_all_256_levels(dtype, white, as_file):
    ramp = np.arange(256).reshape(16, 16)
    image = Image.fromarray((ramp * (white / 255)).astype(dtype))
    assert image.mode in ("I", "F")
    loaded = levels(encode(image, "TIFF") if as_file else image)
    assert np.array_equal(loaded, np.repeat(ramp[:, :, None], 3, axis=2))


def test_levels_that_are_not_finite_do_not_affect_others():
    stored = np.array([[0.0, 0.5, 1.0, np.nan, np.inf, -np.inf, -0.5]], dtype=np.float32)
    assert levels(Image.fromarray(stored))[0, :, 0].tolist() == [0, 128, 255, 0, 255, 0, 0]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV", "LAB", "RGBX", "RGBa", "PA"])
def test_any_mode_of_pil_becomes_rgb(mode):
    image = Image.new("LAB", (13, 7), 90) if mode == "LAB" else Image.fromarray(RGB).convert(mode, palette=1)
    assert image.mode == mode
    assert np.array_equal(levels(image), np.asarray(image.convert("RGB")))


LARGE_JPEG = encode(noise_image(640, 480, seed=6), "JPEG", quality=95)


@pytest.mark.parametrize(
    "draft, size",
    [
        (1, (80, 60)),
        (60, (80, 60)),
        (61, (160, 120)),
        (160, (320, 240)),
        (241, (640, 480)),
    ],
)
def test_a_draft_is_the_smallest_jpeg_scale_that_is_large_enough(draft, size):
    small = load_image(LARGE_JPEG, draft=Draft(1, draft))
    assert small.size == size
    want = np.asarray(load_image(LARGE_JPEG).resize(size, Image.Resampling.BOX)).astype(int)
    assert np.abs(np.asarray(small) - want).mean() < 4


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_draft_is_upright(orientation):
    turned = encode(Image.open(io.BytesIO(LARGE_JPEG)), "JPEG", quality=95, exif=exif(rotated(orientation)))
    stored = np.asarray(load_image(encode(Image.open(io.BytesIO(LARGE_JPEG)), "JPEG", quality=95), draft=Draft(1, 100)))
    assert np.array_equal(np.asarray(load_image(turned, draft=Draft(1, 100))), UPRIGHT[orientation](stored))


@pytest.mark.parametrize("file_format", ["PNG", "GIF", "TIFF", "WEBP", "BMP"])
def test_a_draft_changes_nothing_but_a_jpeg(file_format):
    data = encode(noise_image(320, 240, seed=7), file_format)
    assert np.array_equal(np.asarray(load_image(data, draft=Draft(1, 10))), levels(data))


def test_a_draft_does_not_modify_the_callers_image():
    lazy = Image.open(io.BytesIO(LARGE_JPEG))
    assert load_image(lazy, draft=Draft(1, 10)).size == lazy.size == (640, 480)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(file_format):
    colours = ("red", "lime", "blue")
    frames = [Image.new("RGB", (20, 10), colour) for colour in colours]
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:], lossless=True, duration=50)
    animation = Image.open(io.BytesIO(data))
    assert animation.n_frames == 3
    assert np.array_equal(levels(data), np.asarray(frames[0]))
    for frame, want in zip(ImageSequence.Iterator(animation), frames, strict=True):
        assert np.array_equal(levels(frame), np.asarray(want))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "I;16", "F", "CMYK", "rotated", "transparent"])
def test_the_callers_image_is_never_modified(mode):
    image = Image.fromarray(RGB)
    if mode == "rotated":
        image = Image.open(io.BytesIO(encode(image, exif=exif(rotated(6)))))
        image.load()
    elif mode == "transparent":
        image = image.quantize(8)
        image.info["transparency"] = 3
    else:
        image = image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)
    before = image.mode, image.size, image.tobytes(), dict(image.info), dict(image.getexif())
    loaded = load_image(image)
    loaded.paste((1, 2, 3), (0, 0, *loaded.size))
    assert (image.mode, image.size, image.tobytes(), dict(image.info), dict(image.getexif())) == before


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "TIFF", "GIF"])
def test_threads_may_share_a_lazily_opened_image(file_format):
    data = encode(
        noise_image(160, 120, seed=4), file_format, **({} if file_format == "GIF" else {"exif": exif(rotated(6))})
    )
    want = levels(data)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            shared, together = Image.open(io.BytesIO(data)), threading.Barrier(8)
            loaded = list(pool.map(lambda _: (together.wait(), levels(shared))[1], range(8)))  # noqa: B023
            assert all(np.array_equal(one, want) for one in loaded)
