"""Tensors and grids given with a request are checked before the engine takes it."""

import pytest
import torch

from mmvllm import SamplingParams
from tests.helpers.engine.requests import ask, noise_image

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
GOOD = ask(noise_image(80, 60), "Describe this image.")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pixel_values": torch.zeros(8, 1176)}, "pixel_values have shapes"),
        ({"image_grid_thw": [(1, 3, 4)]}, "multiples of 2"),
        ({"image_grid_thw": [(0, 4, 4)]}, "must have positive sizes"),
        ({"image_grid_thw": [(1, 4, 4), (1, 4, 4)]}, "image"),
        ({"image_grid_thw": None}, "4 image placeholder"),
        ({"vision_placeholders": [(1, 4)]}, "not where the prompt's image tokens are"),
        ({"vision_placeholders": [(0, 3)]}, "have lengths"),
        ({"image_digests": [b"1", b"2"]}, "2 image_digests"),
        ({"image_digests": [[]]}, "each must be bytes"),
        ({"arrival_time": "now"}, "arrival_time must be .*, got 'now'"),
    ],
)
def test_inconsistent_tensors_are_refused(changes, message, llm):
    ids = [llm.engine.model_config.image_token_id] * 4 + [5]
    good = {"pixel_values": torch.zeros(16, 1176), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(ValueError, match=message):
        llm.engine.add_request(ids, SHORT, **{**good, **changes})
    llm.engine.abort_request(llm.engine.add_request(ids, SHORT, **good))


def test_an_image_larger_than_the_encoder_cache_is_refused(checkpoint, make_llm):
    small = make_llm(checkpoint, encoder_cache_bytes=64 * 4)
    with pytest.raises(ValueError, match=r"image 0: has 6 tokens, .* encoder_cache_bytes is 256"):
        small.generate_multimodal([GOOD], SHORT)
