"""The tokens equal transformers': ids, grids, positions, ViT rows, logits, and 32 greedy tokens."""

import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.models.weights import BUNDLED
from tests.conftest import SHAPES, ask, picture

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
A, B, C = picture(91, 64, 1), picture(60, 133, 2), picture(200, 77, 3)
REQUESTS = {
    "text": ask("Count the shapes."),
    "one": ask(A, "Describe this image."),
    "text first": ask("What is at the top? ", B),
    "two": ask(A, B, "Which is larger?"),
    "two apart": ask("First: ", B, " then: ", C, " what changed?"),
    "three": ask(C, A, "and", B, "?"),
    "same twice": ask(A, A, "equal?"),
    "turns": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "image", "image": A}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A red star."}]},
            {"role": "user", "content": [{"type": "text", "text": "And here? "}, {"type": "image", "image": B}]},
        ]
    },
}


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
        assert [list(grid) for grid in prompt.multimodal["image_grid_thw"]] == want["image_grid_thw"].tolist()
        pixels = normalize_patches(torch.cat(prompt.multimodal["pixel_values"]), llm.engine.image_config)
        assert torch.equal(pixels, want["pixel_values"])


@pytest.mark.parametrize("name", REQUESTS)
def test_positions_equal_transformers(name, checkpoint, reference, make_llm):
    from mmvllm.processors.positions import mrope_positions

    hf, prompt = reference("gqa2-tied"), make_llm(checkpoint).processor(REQUESTS[name])
    inputs = hf.inputs(REQUESTS[name])
    want, delta = hf.model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs.get("image_grid_thw")
    )
    multimodal = prompt.multimodal
    got, got_delta = mrope_positions(
        len(prompt.token_ids), multimodal.get("vision_placeholders", ()), multimodal.get("image_grid_thw", ()), 2
    )
    assert torch.equal(torch.from_numpy(got), want[:, 0])
    assert got_delta == delta.item()


@pytest.mark.parametrize("shape", SHAPES)
def test_vit_errs_at_most_twice_as_much_as_transformers(shape, checkpoints, reference, make_llm):
    hf, ours = reference(shape), make_llm(checkpoints(shape)).engine.model_runner.model.visual
    inputs = hf.inputs(REQUESTS["three"])
    patches, grids = inputs["pixel_values"], inputs["image_grid_thw"]
    with torch.inference_mode():
        got = ours(patches, [tuple(grid) for grid in grids.tolist()])
        plain = hf.model.model.visual(patches, grid_thw=grids).pooler_output
        exact = _in_float64(hf.model.model.visual, lambda vit: vit(patches.double(), grid_thw=grids).pooler_output)
    assert_no_worse(got, plain, exact)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["text", "three"])
def test_logits_err_at_most_twice_as_much_as_transformers(shape, name, checkpoints, reference, make_llm):
    hf, engine = reference(shape), make_llm(checkpoints(shape)).engine
    inputs = {**hf.inputs(REQUESTS[name]), "use_cache": False}
    with torch.inference_mode():
        plain = hf.model(**inputs).logits[:, -1]
        exact = _in_float64(hf.model, lambda model: model(**_double(inputs)).logits[:, -1])
    assert_no_worse(first_logits(engine, inputs), plain, exact)


def first_logits(engine, inputs) -> torch.Tensor:
    """Logits (1, V) after a prompt, as the sampler gets them."""
    seen = []
    sampler = engine.sampler
    engine.sampler = lambda logits, *rest: seen.append(logits.clone()) or sampler(logits, *rest)
    multimodal = {key: inputs[key] for key in ("pixel_values", "image_grid_thw") if key in inputs}
    engine.add_request(inputs["input_ids"][0].tolist(), SamplingParams(max_tokens=1), **multimodal)
    while not engine.is_finished():
        engine.step()
    engine.sampler = sampler
    return seen[-1]


def assert_no_worse(got, plain, exact, slack: float = 2.0) -> None:
    """The error against float64 is at most `slack` times that of plain torch in the same dtype."""
    error, allowed = ((x.double() - exact).abs().max().item() for x in (got, plain))
    assert error <= slack * allowed, f"error {error:.2e}, plain torch {allowed:.2e}"


def _double(inputs: dict) -> dict:
    return {key: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for key, x in inputs.items()}


def _in_float64(module, call):
    module.double()
    try:
        return call(module)
    finally:
        module.float()
