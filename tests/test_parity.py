"""Parity with transformers: ids, grids, positions, ViT rows, logits, and 32 greedy tokens."""

import numpy as np
import pytest
import torch

from mmvllm.models.folder import BUNDLED
from tests.helpers.checkpoints import SHAPES
from tests.helpers.parity import GREEDY, REQUESTS
from tests.helpers.reference import assert_no_worse, first_logits, in_double, in_float64
from tests.helpers.requests import grids_of, patches_of, spans_of


@pytest.mark.parametrize("shape", [None, *SHAPES], ids=lambda shape: shape or "bundled")
def test_greedy_tokens_equal_transformers(shape, checkpoints, reference, make_llm):
    llm = make_llm(BUNDLED if shape is None else checkpoints(shape))
    outputs = llm.generate_multimodal(list(REQUESTS.values()), GREEDY)
    for name, request, output in zip(REQUESTS, REQUESTS.values(), outputs, strict=True):
        assert output.token_ids == reference(shape).generate(request), f"{shape}: {name}"


@pytest.mark.parametrize("name", REQUESTS)
def test_ids_grid_and_pixels_equal_transformers(name, checkpoint, reference, make_llm):
    from mmvllm.processors.image import normalize_patches

    llm, want = make_llm(checkpoint), reference("gqa2-tied").inputs(REQUESTS[name])
    prompt = llm.processor(REQUESTS[name])
    assert prompt.token_ids == want["input_ids"][0].tolist()
    if "pixel_values" in want:
        assert [list(grid) for grid in grids_of(prompt)] == want["image_grid_thw"].tolist()
        pixels = normalize_patches(torch.cat(patches_of(prompt)), llm.engine.image_config)
        assert torch.equal(pixels, want["pixel_values"])


@pytest.mark.parametrize("name", REQUESTS)
def test_positions_equal_transformers(name, checkpoint, reference, make_llm):
    from mmvllm.processors.positions import mrope_positions

    hf, prompt = reference("gqa2-tied"), make_llm(checkpoint).processor(REQUESTS[name])
    inputs = hf.inputs(REQUESTS[name])
    want, delta = hf.model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs.get("image_grid_thw")
    )
    got, got_delta = mrope_positions(len(prompt.token_ids), spans_of(prompt), grids_of(prompt), 2)
    if prompt.positions is not None:  # None for text
        assert np.array_equal(prompt.positions, got) and prompt.position_delta == got_delta
    assert torch.equal(torch.from_numpy(got), want[:, 0])
    assert got_delta == delta.item()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_of_the_vit_is_at_most_twice_that_of_transformers(shape, checkpoints, reference, make_llm):
    hf, ours = reference(shape), make_llm(checkpoints(shape)).engine.model_runner.model.visual
    inputs = hf.inputs(REQUESTS["three"])
    patches, grids = inputs["pixel_values"], inputs["image_grid_thw"]
    with torch.inference_mode():
        got = ours(patches, [tuple(grid) for grid in grids.tolist()])
        plain = hf.model.model.visual(patches, grid_thw=grids).pooler_output
        exact = in_float64(hf.model.model.visual, lambda vit: vit(patches.double(), grid_thw=grids).pooler_output)
    assert_no_worse(got, plain, exact)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["text", "three"])
def test_the_error_of_the_logits_is_at_most_twice_that_of_transformers(shape, name, checkpoints, reference, make_llm):
    hf, engine = reference(shape), make_llm(checkpoints(shape)).engine
    inputs = {**hf.inputs(REQUESTS[name]), "use_cache": False}
    with torch.inference_mode():
        plain = hf.model(**inputs).logits[:, -1]
        exact = in_float64(hf.model, lambda model: model(**in_double(inputs)).logits[:, -1])
    assert_no_worse(first_logits(engine, inputs), plain, exact)
