"""M-RoPE positions equal hand-written ones, a token-by-token reference, and transformers'."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from mmvllm.processors.positions import mrope_positions

steady = settings(max_examples=150)

BY_HAND = {
    "text": (3, [], [[0, 1, 2]] * 3, 0),
    "nothing": (0, [], [[], [], []], 0),
    # Two rows of three tokens; the positions of the text continue after the longer side.
    "image in text": (
        10,
        [(2, (1, 4, 6))],
        [
            [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
            [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
            [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
        ],
        -3,
    ),
    "adjacent images": (4, [(0, (1, 2, 4)), (2, (1, 4, 2))], [[0, 0, 2, 2], [0, 0, 2, 3], [0, 1, 2, 2]], 0),
    "two frames": (
        10,
        [(1, (2, 4, 4))],
        [
            [0, 1, 1, 1, 1, 2, 2, 2, 2, 3],
            [0, 1, 1, 2, 2, 1, 1, 2, 2, 3],
            [0, 1, 2, 1, 2, 1, 2, 1, 2, 3],
        ],
        -6,
    ),
    # transformers continues after the longer side, whatever the number of frames, and so do generated tokens.
    "more frames than rows": (5, [(1, (3, 2, 2))], [[0, 1, 2, 3, 2], [0, 1, 1, 1, 2], [0, 1, 1, 1, 2]], -2),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_positions_written_out_by_hand(name):
    num_tokens, images, want, want_delta = BY_HAND[name]
    placeholders = [(offset, t * h * w // 4) for offset, (t, h, w) in images]
    positions, delta = mrope_positions(num_tokens, placeholders, [grid for _, grid in images], merge_size=2)
    assert positions.tolist() == want
    assert positions.dtype == np.int64 and positions.shape == (3, num_tokens)
    assert delta == want_delta


def prompt_of(
    texts: list[int], grids: list[tuple[int, int, int]], merge_size: int
) -> tuple[int, list[tuple[int, int]]]:
    """Length and placeholders of a prompt with an image between each two texts."""
    at, placeholders = texts[0], []
    for text, (t, h, w) in zip(texts[1:], grids, strict=True):
        length = t * h * w // merge_size**2
        placeholders.append((at, length))
        at += length + text
    return at, placeholders


@st.composite
def prompts(draw, shortest_text: int = 0):
    """(texts, grids, merge size)"""
    merge_size = draw(st.integers(1, 3))
    size = st.integers(1, 6).map(lambda n: n * merge_size)
    grids = draw(st.lists(st.tuples(st.integers(1, 4), size, size), max_size=4))
    texts = draw(st.lists(st.integers(shortest_text, 9), min_size=len(grids) + 1, max_size=len(grids) + 1))
    return texts, grids, merge_size


@steady
@given(prompts())
def test_positions_equal_a_token_by_token_reference(prompt):
    texts, grids, merge_size = prompt
    num_tokens, placeholders = prompt_of(*prompt)
    want, here = [(i, i, i) for i in range(texts[0])], texts[0]
    for text, (t, h, w) in zip(texts[1:], grids, strict=True):
        rows, columns = h // merge_size, w // merge_size
        for frame in range(t):
            for row in range(rows):
                want += [(here + frame, here + row, here + column) for column in range(columns)]
        here += max(rows, columns)
        want += [(here + i,) * 3 for i in range(text)]
        here += text
    positions, delta = mrope_positions(num_tokens, placeholders, grids, merge_size)
    assert positions.T.tolist() == [list(one) for one in want]
    assert delta == here - len(want), "a completion continues as the text of the prompt would"


@steady
@given(prompts(shortest_text=1))  # transformers merges images without text between them
def test_positions_equal_transformers(prompt):
    _, grids, merge_size = prompt
    num_tokens, placeholders = prompt_of(*prompt)
    is_image = torch.zeros(1, num_tokens, dtype=torch.int)
    for offset, length in placeholders:
        is_image[0, offset : offset + length] = 1
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=merge_size))
    model = SimpleNamespace(config=config, get_vision_position_ids=partial(Qwen2VLModel.get_vision_position_ids, None))
    want, _ = Qwen2VLModel.get_rope_index(model, is_image.long(), is_image, torch.tensor(grids).view(-1, 3))
    positions, delta = mrope_positions(num_tokens, placeholders, grids, merge_size)
    assert torch.equal(torch.from_numpy(positions), want[:, 0])
    assert delta + num_tokens == want[0, 0, -1] + 1, "where transformers' `generate` continues"


@pytest.mark.slow
@steady
@given(st.integers(1, 9), st.sampled_from([1, 2, 4]), st.floats(0.03, 9.0))
def test_time_steps_are_those_of_transformers(t, tokens_per_second, seconds):
    """Its Qwen2.5-VL model computes them in float32."""
    want = Qwen2VLModel.get_vision_position_ids(
        None, 3, torch.tensor([t, 4, 6]), 1, 2, tokens_per_second * torch.tensor(seconds)
    )
    step = float(np.float32(tokens_per_second) * np.float32(seconds))
    positions, _ = mrope_positions(3 + 6 * t, [(3, 6 * t)], [(t, 4, 6)], 2, [step])
    assert torch.equal(torch.from_numpy(positions[:, 3:]), want)


def test_a_placeholder_of_another_length_than_its_grid_is_refused():
    with pytest.raises(AssertionError, match=r"grid \(1, 4, 4\) gives 4 tokens, placeholder 5"):
        mrope_positions(5, [(0, 5)], [(1, 4, 4)], 2)
