"""Tokenizers, chat templates and image settings of the published checkpoints, over tiny models of random weights."""

import json
from math import prod
from pathlib import Path

import pytest
from transformers import AutoImageProcessor, AutoTokenizer

from mmvllm import LLM, SamplingParams
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.models.metadata import ROOT, needs_metadata
from tests.helpers.models.tokenizers import link_checkpoint

pytestmark = [needs_metadata, pytest.mark.slow]

NAMES = (
    "Qwen2-VL-2B-Instruct",
    "Qwen2-VL-7B-Instruct",
    "Qwen2.5-VL-3B-Instruct",
    "Qwen2.5-VL-7B-Instruct",
    "Qwen3-VL-2B-Instruct",
    "Qwen3-VL-4B-Instruct",
    "Qwen3-VL-8B-Instruct",
    "Qwen3-4B",
)
TEXT_ONLY = ("Qwen3-4B",)
MARKED_UP = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe this image.<|im_end|>\n"
MARKED_UP_IDS = [151644, 872, 198, 151652, 151655, 151653, 74785, 419, 2168, 13, 151645, 198]
A, B, C = noise_image(150, 90), noise_image(60, 133), noise_image(99, 64)


def turn(role: str, *parts) -> dict:
    return {"role": role, "content": ask(*parts)["messages"][0]["content"]}


TEXTS = {
    "text": ask("What is the capital of France? 你好, naïve café 🙂 1234"),
    "system": {"messages": [turn("system", "Be brief."), turn("user", "Name a colour.")]},
    "empty system": {"messages": [turn("system", ""), turn("user", "Name a colour.")]},
    "turns": {"messages": [turn("user", "One?"), turn("assistant", "Two."), turn("user", "Three?")]},
}
IMAGES = {
    "one": ask(A, "Describe this image."),
    "two": ask("First: ", B, " then: ", C, " what changed?"),
    "three": ask(A, B, C),
    "image turns": {
        "messages": [
            turn("system", "You compare ", "images."),
            turn("user", A, "What?"),
            turn("assistant", "A red star."),
            turn("user", "And here? ", B, C),
        ]
    },
}


def shrunk(config: dict) -> dict:
    """A config of the same kind with a tiny model."""
    text = config.get("text_config", config)
    text |= {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1} | ({"head_dim": 16} if "head_dim" in text else {})
    if text.get("rope_scaling"):
        text["rope_scaling"]["mrope_section"] = [4, 2, 2]
    if "vision_config" in config:
        vision = config["vision_config"]
        width = "embed_dim" if "embed_dim" in vision else "hidden_size"
        out = "hidden_size" if "embed_dim" in vision else "out_hidden_size"
        vision |= {"depth": 1, "num_heads": 2, width: 16, out: 32}
        vision |= {"intermediate_size": 32, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
    return config


@pytest.fixture(scope="module", params=NAMES)
def tiny(request, tmp_path_factory):
    """The name of a checkpoint, and an LLM with its tokenizer, template and ids over a tiny model of random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    link_checkpoint(request.param, folder)
    for path in (folder / "config.json", *folder.glob("*index*")):
        path.unlink()
    config = json.loads((ROOT / request.param / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shrunk(config)))
    llm = LLM(folder, load_format="dummy", dtype="float32", device="cpu", num_kvcache_blocks=64)
    yield request.param, llm
    llm.exit()


@pytest.fixture(scope="module")
def published(tiny, tmp_path_factory):
    """The tokenizer and image processor of transformers, from the checkpoint's files."""
    folder = tmp_path_factory.mktemp("published")
    link_checkpoint(tiny[0], folder)
    images = None if tiny[0] in TEXT_ONLY else AutoImageProcessor.from_pretrained(folder, backend="pil")
    return folder, AutoTokenizer.from_pretrained(folder), images


def reference_ids(published: tuple, request: dict, **template_arguments) -> list[int]:
    """Token ids by the processing of transformers."""
    folder, tokenizer, image_processor = published
    messages = request["messages"] if image_processor else [joined(message) for message in request["messages"]]
    template = tokenizer.chat_template or json.loads((Path(folder) / "chat_template.json").read_text())["chat_template"]
    text = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True, **template_arguments
    )
    images = [part["image"] for message in messages for part in message["content"] if "image" in part]
    grids = image_processor(images)["image_grid_thw"] if images else []
    for grid in grids:
        text = text.replace("<|image_pad|>", "<|placeholder|>" * (prod(map(int, grid)) // 4), 1)
    return tokenizer(text.replace("<|placeholder|>", "<|image_pad|>"))["input_ids"]


def joined(message: dict) -> dict:
    """A message of a text-only model's template: a string instead of parts."""
    return {**message, "content": "".join(part["text"] for part in message["content"])}


@pytest.mark.thinned(9)
@pytest.mark.parametrize("kind", [*TEXTS, *IMAGES])
def test_ids_equal_transformers(kind, tiny, published):
    name, llm = tiny
    if name in TEXT_ONLY and kind in IMAGES:
        with pytest.raises(ValueError, match="text-only"):
            llm.processor(IMAGES[kind])
    else:
        request = (TEXTS | IMAGES)[kind]
        assert llm.processor(request).token_ids == reference_ids(published, request)


@pytest.mark.parametrize("arguments", [{"enable_thinking": False}, {"enable_thinking": True}, {"add_vision_id": True}])
@pytest.mark.parametrize("kind", ["turns", "image turns"])
def test_arguments_of_the_template_mean_what_they_mean_in_transformers(kind, arguments, tiny, published):
    name, llm = tiny
    if name in TEXT_ONLY and kind in IMAGES:
        kind = "system"
    request = (TEXTS | IMAGES)[kind]
    want = reference_ids(published, request, **arguments)
    assert llm.processor({**request, "chat_template_kwargs": arguments}).token_ids == want
    matters = kind in IMAGES if "add_vision_id" in arguments else name in TEXT_ONLY and not arguments["enable_thinking"]
    assert (want != reference_ids(published, request)) == matters


def test_grids_and_pixels_have_the_published_bounds(tiny, published):
    name, llm = tiny
    if name not in TEXT_ONLY:
        size, config = published[2].size, llm.engine.image_config
        assert (config.min_pixels, config.max_pixels) == (size["shortest_edge"], size["longest_edge"])
        assert config.factor == (32 if name.startswith("Qwen3") else 28)


def test_special_tokens_have_their_published_ids(tiny):
    name, llm = tiny
    assert llm.tokenizer(MARKED_UP)["input_ids"] == MARKED_UP_IDS
    assert llm.tokenizer.decode(MARKED_UP_IDS, skip_special_tokens=True) == "user\nDescribe this image.\n"
    if name not in TEXT_ONLY:
        ids = llm.processor(IMAGES["one"]).token_ids
        start, end = ids.index(151652), ids.index(151653)
        assert set(ids[start + 1 : end]) == {151655}
        assert ids[start - 3 : start] == MARKED_UP_IDS[:3] and ids[end : end + 7] == MARKED_UP_IDS[5:]


def test_an_engine_with_published_ids_generates(tiny):
    name, llm = tiny
    requests = TEXTS if name in TEXT_ONLY else TEXTS | IMAGES
    assert llm.engine.executor.sampler.eos_token_ids == {151645, 151643}
    outputs = llm.generate_multimodal(list(requests.values()), SamplingParams(max_tokens=2, ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [2] * len(requests)
    for request, output in zip(requests.values(), outputs, strict=True):
        assert output.num_image_tokens == llm.processor(request).token_ids.count(151655)
