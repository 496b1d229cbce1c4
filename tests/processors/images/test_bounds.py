"""A request's `max_pixels` is never exceeded, also below the checkpoint's `min_pixels`."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.processors.images.processor import ImageProcessor
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.media.images import image_config

CONFIG = image_config()
TOKEN = CONFIG.factor**2  # pixels of one token
ONE = SamplingParams(max_tokens=1)


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


@settings(max_examples=200)
@given(height=st.integers(28, 2000), width=st.integers(28, 2000), tokens=st.integers(4, 2000))
def test_from_min_pixels_on_the_rule_is_transformers(height, width, tokens):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    want = smart_resize(height, width, CONFIG.factor, CONFIG.min_pixels, tokens * TOKEN)
    assert CONFIG.resized(height, width, max_pixels=tokens * TOKEN) == want


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


def test_a_min_pixels_of_the_request_above_its_max_pixels_is_refused():
    with pytest.raises(ValueError, match="min_pixels is 1600, above max_pixels 900"):
        CONFIG.resized(60, 60, min_pixels=1600, max_pixels=900)


@settings(max_examples=30)
@given(width=st.integers(20, 300), height=st.integers(20, 300), tokens=st.integers(1, 3))
def test_prepared_images_have_no_more_tokens_than_asked_for(width, height, tokens):
    made = ImageProcessor(CONFIG)(noise_image(width, height), max_pixels=tokens * TOKEN)
    t, h, w = made.grid
    assert t * h * w // 4 <= tokens and len(made.patches) == t * h * w


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_both_front_doors_keep_the_bound(tokens, checkpoint, make_llm):
    question = ask(noise_image(300, 200), "What?", max_pixels=tokens * TOKEN + 5)

    async def online() -> int:
        options = {"device": "cpu", "num_kvcache_blocks": 64, "skip_warmup": True}
        async with AsyncLLM(checkpoint, **options) as engine:
            return [delta async for delta in engine.generate(question, ONE)][-1].output.num_image_tokens

    assert 1 <= make_llm(checkpoint).generate_multimodal(question, ONE)[0].num_image_tokens <= tokens
    assert 1 <= asyncio.run(online()) <= tokens
