"""Parity with transformers of every family: ids, grids, positions, rows of images, logits, and 32 greedy tokens."""

import numpy as np
import pytest
import torch

from mmvllm.models.folder import BUNDLED
from mmvllm.processors.positions import mrope_positions
from tests.helpers.engine.requests import ask, grids_of, patches_of, ranges_of
from tests.helpers.media.images import normalized
from tests.helpers.models.parity import EXACT, GREEDY, REQUESTS
from tests.helpers.models.reference import assert_no_worse, first_logits
from tests.helpers.models.shapes import IMAGE_SHAPES, RICHEST


@pytest.mark.essential(4)
@pytest.mark.slow
@pytest.mark.thinned(8)
@pytest.mark.parametrize("shape", [None, *IMAGE_SHAPES], ids=lambda shape: shape or "bundled")
def test_greedy_tokens_equal_transformers(shape, checkpoints, reference, make_llm):
    llm = make_llm(BUNDLED if shape is None else checkpoints(shape))
    outputs = llm.generate_multimodal(list(REQUESTS.values()), GREEDY)
    for name, request, output in zip(REQUESTS, REQUESTS.values(), outputs, strict=True):
        assert output.token_ids == reference(shape).generate(request), f"{shape}: {name}"


@pytest.mark.thinned(8)
@pytest.mark.parametrize("shape", RICHEST)
@pytest.mark.parametrize("name", REQUESTS)
def test_ids_grid_and_pixels_equal_transformers(name, shape, checkpoints, reference, make_llm):
    llm, want = make_llm(checkpoints(shape)), reference(shape).inputs(REQUESTS[name])
    prompt = llm.processor(REQUESTS[name])
    assert prompt.token_ids == want["input_ids"][0].tolist()
    if "pixel_values" in want:
        assert [list(grid) for grid in grids_of(prompt)] == want["image_grid_thw"].tolist()
        pixels = normalized(torch.cat(patches_of(prompt)), llm.engine.image_config)
        assert torch.equal(pixels, want["pixel_values"])


@pytest.mark.thinned(8)
@pytest.mark.parametrize("shape", RICHEST)
@pytest.mark.parametrize("name", REQUESTS)
def test_positions_equal_transformers(name, shape, checkpoints, reference, make_llm):
    hf, prompt = reference(shape), make_llm(checkpoints(shape)).processor(REQUESTS[name])
    inputs = hf.inputs(REQUESTS[name])
    want, delta = hf.model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs.get("image_grid_thw")
    )
    got, got_delta = mrope_positions(len(prompt.token_ids), ranges_of(prompt), grids_of(prompt), 2)
    if prompt.positions is not None:  # None for text
        assert np.array_equal(prompt.positions, got) and prompt.position_delta == got_delta
    assert torch.equal(torch.from_numpy(got), want[:, 0])
    assert got_delta == delta.item()


def assert_rows_no_worse(model, hf, inputs: dict) -> None:
    grids = [tuple(grid) for grid in inputs["image_grid_thw"].tolist()]
    with torch.inference_mode():
        got = model.encode(inputs["pixel_values"], grids)
    assert got.shape == (sum(t * h * w // 4 for t, h, w in grids), model.config.mm_embed_size)
    exact = hf.in_float64(hf.mm_embeds, inputs)
    # Each slice by itself: the rows of DeepStack layers differ in size from the others.
    width = model.config.hidden_size
    for slices in zip(*(rows.split(width, dim=1) for rows in (got, hf.mm_embeds(inputs), exact)), strict=True):
        assert_no_worse(*slices)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("shape", IMAGE_SHAPES)
@pytest.mark.parametrize("request_", [REQUESTS["three"], EXACT], ids=["odd sizes", "whole windows"])
def test_the_error_of_the_vit_is_at_most_twice_that_of_transformers(shape, request_, checkpoints, reference, make_llm):
    hf, model = reference(shape), make_llm(checkpoints(shape)).engine.model_runner.model
    assert_rows_no_worse(model, hf, hf.inputs(request_))


@pytest.mark.parametrize("shape", RICHEST)
def test_the_error_of_several_frames_is_at_most_twice_that_of_transformers(shape, checkpoints, reference, make_llm):
    hf, model = reference(shape), make_llm(checkpoints(shape)).engine.model_runner.model
    grids = torch.tensor([[3, 6, 10], [1, 2, 4], [2, 8, 4]])
    noise = torch.randn(int(grids.prod(dim=1).sum()), model.config.vision.patch_dim)
    assert_rows_no_worse(model, hf, {"pixel_values": noise, "image_grid_thw": grids})


TEXTS = [REQUESTS["text"], *(ask(text) for text in ("Hello", "What is at the top?", "Name a colour.", "1, 2, 3"))]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("shape", IMAGE_SHAPES)
@pytest.mark.parametrize("requests", [TEXTS, [REQUESTS["three"], REQUESTS["one"]]], ids=["texts", "images"])
def test_the_error_of_the_logits_is_at_most_twice_that_of_transformers(
    shape, requests, checkpoints, reference, make_llm
):
    hf, engine = reference(shape), make_llm(checkpoints(shape)).engine
    inputs = [hf.inputs(request) for request in requests]  # several: the largest error of one is a matter of chance
    exact = [hf.in_float64(hf.logits, one) for one in inputs]
    got, plain = [first_logits(engine, one) for one in inputs], [hf.logits(one) for one in inputs]
    assert_no_worse(*map(torch.cat, (got, plain, exact)))
