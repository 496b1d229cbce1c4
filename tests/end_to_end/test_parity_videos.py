"""Parity with transformers of every family on clips: ids, grids, patches, positions, rows, logits and greedy tokens."""

import numpy as np
import pytest
import torch

from mmvllm.processors.tensors import NAMES
from tests.helpers.engine.requests import ask, frames
from tests.helpers.media.images import normalized
from tests.helpers.models.parity import GREEDY, VIDEOS
from tests.helpers.models.reference import assert_no_worse, first_logits
from tests.helpers.models.shapes import IMAGE_SHAPES, RICHEST

pytestmark = [pytest.mark.spawns, pytest.mark.thinned]

every_shape = pytest.mark.parametrize("shape", RICHEST)


@pytest.mark.slow
@every_shape
def test_greedy_tokens_equal_transformers(shape, checkpoints, reference, make_llm):
    outputs = make_llm(checkpoints(shape)).generate_multimodal(list(VIDEOS.values()), GREEDY)
    for name, request, output in zip(VIDEOS, VIDEOS.values(), outputs, strict=True):
        assert output.token_ids == reference(shape).generate(request), f"{shape}: {name}"


@pytest.mark.essential(2)
@pytest.mark.parametrize("shape", [shape for shape in IMAGE_SHAPES if shape not in RICHEST])
def test_greedy_tokens_of_other_shapes_equal_transformers(shape, checkpoints, reference, make_llm):
    request = VIDEOS["clips and images"]
    [output] = make_llm(checkpoints(shape)).generate_multimodal([request], GREEDY)
    assert output.token_ids == reference(shape).generate(request)


@every_shape
@pytest.mark.parametrize("number", [2, 3, 8, 17])
def test_clips_of_any_number_of_frames(number, shape, checkpoints, reference, make_llm):
    request = ask(frames(number, 64, 90, number), "Describe this video.")
    [output] = make_llm(checkpoints(shape)).generate_multimodal([request], GREEDY)
    assert output.token_ids == reference(shape).generate(request)


@every_shape
def test_a_clip_of_one_frame(shape, checkpoints, reference, make_llm):
    """transformers refuses it for Qwen3-VL; there the frame stands twice, at the time of the first."""
    llm, hf, [frame] = make_llm(checkpoints(shape)), reference(shape), frames(1, 64, 90)
    want = hf.inputs(ask([frame] * 2 if "3" in hf.family else [frame], "Describe this video."))
    prompt = llm.processor(ask([frame], "Describe this video."))
    ids = want["input_ids"]
    if "3" in hf.family:
        first = hf.tokenizer(hf.tokenizer.decode(ids[0]).replace("<0.2 seconds>", "<0.0 seconds>"))["input_ids"]
        assert len(first) == len(ids[0])
        ids = torch.tensor([first])
    assert prompt.token_ids == ids[0].tolist()
    assert torch.equal(pixels(prompt, "video", llm), want["pixel_values_videos"])


def pixels(prompt, modality: str, llm) -> torch.Tensor:
    """Normalized patches of a prompt's images or videos."""
    patches = torch.cat([item.patches for item in prompt.mm_items if item.modality == modality])
    return normalized(patches, llm.engine.image_config if modality == "image" else llm.engine.video_config)


@pytest.mark.essential(2)
@every_shape
@pytest.mark.parametrize("name", VIDEOS)
def test_ids_grids_patches_and_positions_equal_transformers(name, shape, checkpoints, reference, make_llm):
    llm, hf = make_llm(checkpoints(shape)), reference(shape)
    want, prompt = hf.inputs(VIDEOS[name]), llm.processor(VIDEOS[name])
    assert prompt.token_ids == want["input_ids"][0].tolist()
    for modality, names in NAMES.items():
        if names[0] in want:
            grids = [item.grid for item in prompt.mm_items if item.modality == modality]
            assert grids == [(1, h, w) for t, h, w in want[names[1]].tolist() for _ in range(t)]
            assert torch.equal(pixels(prompt, modality, llm), want[names[0]])
    positions, _ = hf.positions(want)
    assert np.array_equal(prompt.positions, positions)
    assert prompt.position_delta + len(prompt.token_ids) == positions[0, -1] + 1


@every_shape
def test_tensors_of_transformers_give_the_same_prompt(shape, checkpoints, reference, make_llm):
    """Patches of several temporal patches become as many items, at the same positions."""
    llm, request = make_llm(checkpoints(shape)), VIDEOS["clips and images"]
    want, prompt = reference(shape).inputs(request), llm.processor(request)
    names = (*NAMES["image"], *NAMES["video"], "second_per_grid_ts")
    tensors = {name: want[name] for name in names if name in want}
    made = llm.engine.input_processor.engine_input(want["input_ids"][0], **tensors)
    assert made.token_ids == prompt.token_ids and made.position_delta == prompt.position_delta
    assert np.array_equal(made.positions, prompt.positions)
    assert [(item.modality, item.grid, item.placeholder) for item in made.mm_items] == [
        (item.modality, item.grid, item.placeholder) for item in prompt.mm_items
    ]


def test_tensors_without_times_are_placed_as_transformers_does_it(checkpoints, reference, make_llm):
    """Qwen2.5-VL takes one second from one temporal patch to the next."""
    llm, want = make_llm(checkpoints("windows4-tied")), reference("windows4-tied").inputs(VIDEOS["32 frames"])
    tensors = {name: want[name] for name in NAMES["video"]}
    made = llm.engine.input_processor.engine_input(want["input_ids"][0], **tensors)
    without = {name: value for name, value in want.items() if name != "second_per_grid_ts"}
    assert np.array_equal(made.positions, reference("windows4-tied").positions(without)[0])


@every_shape
@pytest.mark.parametrize("name", ["two clips", "32 frames"])
def test_the_error_of_the_vit_and_of_the_logits_is_at_most_twice_that_of_transformers(
    name, shape, checkpoints, reference, make_llm
):
    hf, engine = reference(shape), make_llm(checkpoints(shape)).engine
    inputs, model = hf.inputs(VIDEOS[name]), engine.model_runner.model
    grids = [tuple(grid) for grid in inputs["video_grid_thw"].tolist()]
    with torch.inference_mode():
        rows = model.encode(inputs["pixel_values_videos"], grids)
    exact = hf.in_float64(hf.mm_embeds, inputs)
    parts = [x.split(model.config.hidden_size, dim=1) for x in (rows, hf.mm_embeds(inputs), exact)]
    for slices in zip(*parts, strict=True):  # the rows of DeepStack layers differ in size from the others
        assert_no_worse(*slices)
    assert_no_worse(first_logits(engine, inputs), hf.logits(inputs), hf.in_float64(hf.logits, inputs))
