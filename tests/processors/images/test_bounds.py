"""A request's `max_pixels` is never exceeded, also below the checkpoint's `min_pixels`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmvllm.processors.images.processor import ImageProcessor
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import image_config

CONFIG = image_config()
TOKEN = CONFIG.factor**2  # pixels of one token


@pytest.mark.slow
@settings(max_examples=600)
@given(
    short=st.integers(1, 3000),
    ratio=st.floats(1, 200),
    is_tall=st.booleans(),
    below=st.integers(0, 10_000),
    min_tokens=st.integers(2, 400),
)
def test_the_area_never_exceeds_max_pixels_below_min_pixels(short, ratio, is_tall, below, min_tokens):
    config = image_config(min_pixels=min_tokens * TOKEN, max_pixels=1000 * TOKEN)
    max_pixels = TOKEN + below % (config.min_pixels - TOKEN)  # at least one token, below the checkpoint's minimum
    long = int(short * ratio)
    height, width = (long, short) if is_tall else (short, long)
    resized = config.resized(height, width, max_pixels=max_pixels)
    assert resized[0] * resized[1] <= max_pixels
    assert min(resized) >= config.factor and not any(side % config.factor for side in resized)


@pytest.mark.parametrize("is_tall", [False, True])
def test_the_longer_side_stays_the_longer_one(is_tall):
    height, width = (600, 100) if is_tall else (100, 600)
    resized = CONFIG.resized(height, width, max_pixels=3 * TOKEN)
    assert resized == ((84, 28) if is_tall else (28, 84))


@pytest.mark.parametrize("max_pixels", [1, TOKEN - 1])
def test_less_than_a_token_is_refused(max_pixels):
    with pytest.raises(
        ValueError, match=f"max_pixels must be at least {TOKEN}, the pixels of one token, got {max_pixels}"
    ):
        CONFIG.resized(60, 60, max_pixels=max_pixels)


@settings(max_examples=30)
@given(width=st.integers(20, 300), height=st.integers(20, 300), tokens=st.integers(1, 3))
def test_prepared_images_have_no_more_tokens_than_asked_for(width, height, tokens):
    made = ImageProcessor(CONFIG)(noise_image(width, height), max_pixels=tokens * TOKEN)
    t, h, w = made.grid
    assert t * h * w // 4 <= tokens and len(made.patches) == t * h * w
