"""`jpeg_draft` decodes a JPEG at a reduced scale that has the pixels the model is given, and keeps its full size."""

import numpy as np
import pytest
from PIL import ExifTags, Image, PngImagePlugin

from mmvllm.errors import ImageError, RequestError
from mmvllm.media.decoding import MediaDecoder
from mmvllm.media.policy import MediaPolicy
from mmvllm.processors.chat.requests import parse_request
from mmvllm.processors.images.draft import Draft, source_size
from mmvllm.processors.images.load import load_image
from mmvllm.processors.images.processor import (
    ImageProcessor,
    SourceGeometry,
    draft_for,
    patches_of,
    patchify,
    resize_for_part,
)
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import encode, image_config

CONFIG = image_config(max_pixels=28 * 28 * 64)
SIZES = [(1601, 1203), (1203, 1601), (3000, 20), (448, 448), (900, 901), (30, 30)]


def jpeg(width: int, height: int, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encode(noise_image(width, height), "JPEG", exif=exif.tobytes())


@pytest.mark.thinned(6)
@pytest.mark.parametrize("width, height", SIZES)
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("part", [{}, {"max_pixels": 28 * 28 * 9}, {"min_pixels": 28 * 28 * 300}])
def test_a_draft_is_never_smaller_than_what_the_model_is_given(width, height, orientation, part):
    data = jpeg(width, height, orientation)
    full, draft = load_image(data), load_image(data, draft_for(CONFIG, part))
    assert source_size(draft) == full.size
    assert SourceGeometry.of(draft) == SourceGeometry.of(full)
    resized = [resize_for_part(image, part, CONFIG.factor) for image in (full, draft)]
    whole, made = (ImageProcessor(CONFIG)(image) for image in resized)
    assert made.grid == whole.grid
    target = resized[1].size if part else (whole.grid[2] * CONFIG.patch_size, whole.grid[1] * CONFIG.patch_size)
    assert all(a >= b or a == c for a, b, c in zip(draft.size, target, full.size, strict=True))


def test_a_large_jpeg_has_other_pixel_values_and_another_digest():
    data, process = jpeg(1601, 1203), ImageProcessor(CONFIG)
    draft = load_image(data, draft_for(CONFIG, {}))
    assert draft.size == (401, 301)
    whole, made = process(load_image(data)), process(draft)
    assert made.digests != whole.digests
    assert not made.patches.equal(whole.patches)
    plain = draft.copy()
    plain.info.clear()
    assert process(plain).digests != made.digests  # the digest covers what was done, not the pixels alone


def test_a_size_of_its_own_is_made_from_the_full_image():
    assert draft_for(CONFIG, {"resized_height": 1000, "resized_width": 28}) is None


def test_the_text_of_a_file_does_not_set_the_full_size():
    text = PngImagePlugin.PngInfo()
    text.add_text("mmvllm.source_size", "of any length")
    data = encode(noise_image(60, 30), "PNG", pnginfo=text)
    for draft in (None, Draft(1000, 28)):
        assert source_size(load_image(data, draft)) == (60, 30)


def test_an_image_cut_from_a_draft_has_a_size_of_its_own():
    draft = load_image(jpeg(1601, 1203), draft_for(CONFIG, {}))
    assert source_size(load_image(draft.crop((0, 0, 60, 30)))) == (60, 30)


def test_limits_apply_to_the_full_size():
    with pytest.raises(ImageError, match="1601x1203, more than 1000000 pixels"):
        MediaPolicy(max_pixels=1_000_000).load(jpeg(1601, 1203), Draft(1, 1))


@pytest.mark.spawns
def test_a_worker_process_decodes_a_draft():
    data, draft, decoder = jpeg(1601, 1203, 6), draft_for(CONFIG, {}), MediaDecoder(MediaPolicy())
    try:
        with decoder.session() as load:
            made = load.image(data, draft)
    finally:
        decoder.close()
    here = load_image(data, draft)
    assert (made.size, source_size(made), made.tobytes()) == (here.size, (1203, 1601), here.tobytes())


def test_requests_may_ask_for_it():
    request = {"text": "x", "mm_processor_kwargs": {"jpeg_draft": True, "max_pixels": 5000}}
    parsed = parse_request(request | {"videos": ["a.mp4"]})
    assert parsed.jpeg_draft and parsed.video_kwargs == [{"max_pixels": 5000}]
    assert parse_request({"messages": [{"role": "user", "content": "x"}], **request} | {"text": None}).jpeg_draft
    assert not parse_request({"text": "x"}).jpeg_draft
    with pytest.raises(RequestError, match="jpeg_draft must be True or False, got 1"):
        parse_request({"text": "x", "mm_processor_kwargs": {"jpeg_draft": 1}})


@pytest.mark.parametrize("patch_size", [14, 16])
@pytest.mark.parametrize("frames", [1, 2, 3])
def test_patches_cut_in_strips_equal_those_of_equal_frames(monkeypatch, patch_size, frames):
    monkeypatch.setattr("mmvllm.processors.images.processor.STRIP_PIXELS", 2 * patch_size * 5 * 2 * patch_size * 2)
    image = noise_image(2 * patch_size * 5, 2 * patch_size * 7)  # strips of two rows of tokens, the last one of one
    clip = np.repeat(np.asarray(image)[None, None], frames, axis=1)
    assert np.array_equal(patches_of(image, patch_size, 2, frames), patchify(clip, patch_size, 2)[0])
