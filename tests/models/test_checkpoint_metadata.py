"""Configs, weight names and tokenizers of the published checkpoints; their weights are not needed.

MMVLLM_CHECKPOINT_METADATA names a folder that has, per checkpoint, a folder with the repository's small files.
"""

import json
import os
from collections import defaultdict
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmvllm import LLM, SamplingParams
from mmvllm.models.registry import load_config
from mmvllm.models.weights import load_model
from tests.helpers.configs import assert_equals_transformers
from tests.helpers.requests import ask, noise_image

VARIABLE = "MMVLLM_CHECKPOINT_METADATA"
ROOT = Path(os.environ.get(VARIABLE) or "unset")
pytestmark = pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no folder of metadata")

BIG, SMALL, QUANTIZED = "Qwen2-VL-7B-Instruct", "Qwen2-VL-2B-Instruct", "Qwen2-VL-2B-Instruct-AWQ"
FACTS = {  # hidden size, intermediate size, query heads, KV heads, vocabulary, tied, dtype
    SMALL: (1536, 8960, 12, 2, 151936, True, torch.bfloat16),
    BIG: (3584, 18944, 28, 4, 152064, False, torch.bfloat16),
    QUANTIZED: (1536, 8960, 12, 2, 151936, True, torch.float16),
}
MARKED_UP = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe this image.<|im_end|>\n"
MARKED_UP_IDS = [151644, 872, 198, 151652, 151655, 151653, 74785, 419, 2168, 13, 151645, 198]


@pytest.mark.parametrize("name", FACTS)
def test_configs_equal_transformers_and_the_facts(name):
    config = assert_equals_transformers(ROOT / name)
    hidden_size, intermediate_size, heads, kv_heads, vocab_size, tied, dtype = FACTS[name]
    assert (config.hidden_size, config.intermediate_size) == (hidden_size, intermediate_size)
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
    assert (config.vocab_size, config.tie_word_embeddings, config.dtype) == (vocab_size, tied, dtype)
    assert (config.num_hidden_layers, config.head_dim, config.max_position_embeddings) == (28, 128, 32768)
    assert (config.rope_theta, config.mrope_section, config.rms_norm_eps) == (1e6, (16, 24, 24), 1e-6)
    assert (config.vision.depth, config.vision.embed_dim, config.vision.intermediate_size) == (32, 1280, 5120)
    assert (config.vision.num_heads, config.vision.out_hidden_size) == (16, hidden_size)
    assert (config.vision.head_dim, config.vision.patch_dim) == (80, 1176)
    assert config.eos_token_ids == {151645, 151643} and config.image_token_id == 151655
    assert config.quantization == ("awq" if name == QUANTIZED else None)


def index_of(name: str) -> dict:
    (path,) = (ROOT / name).glob("*.index*.json")
    return json.loads(path.read_text())


def transformers_shapes(name: str) -> dict[str, torch.Size]:
    """Shapes of the model in transformers, by published tensor name."""
    with torch.device("meta"):
        model = Qwen2VLForConditionalGeneration(AutoConfig.from_pretrained(ROOT / name))
    return {
        key.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor.shape
        for key, tensor in model.state_dict().items()
    }


def write_sparse_zeros(path: Path, shapes: dict[str, torch.Size]) -> None:
    """A bfloat16 safetensors file of these shapes, all zeros, as a sparse file."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


@pytest.mark.parametrize("name", [SMALL, BIG])
def test_published_tensors_and_parameters_match_one_to_one(name, tmp_path):
    """Loads a checkpoint with the published names, shards and shapes onto the meta device."""
    index, shapes = index_of(name), transformers_shapes(name)
    shards = defaultdict(dict)
    for tensor, file in index["weight_map"].items():
        shards[file][tensor] = shapes[tensor]
    for file, inside in shards.items():
        write_sparse_zeros(tmp_path / file, inside)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    num_values = sum(prod(shapes[tensor]) for tensor in index["weight_map"])
    assert 2 * num_values == index["metadata"]["total_size"]
    config = load_config(ROOT / name)
    model = load_model(tmp_path, config, torch.device("meta"), torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_values


@pytest.fixture(scope="module", params=[SMALL, BIG])
def tiny(request, tmp_path_factory):
    """The name of a checkpoint, and an LLM with its tokenizer, template and ids over a tiny model of random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    for path in (ROOT / request.param).iterdir():
        if path.name != "config.json" and "index" not in path.name:
            (folder / path.name).symlink_to(path)
    config = json.loads((ROOT / request.param / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    config["rope_scaling"]["mrope_section"] = [2, 3, 3]
    config["vision_config"] |= {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(folder, load_format="dummy", dtype="float32", device="cpu", num_kvcache_blocks=32)
    yield request.param, llm
    llm.exit()


def reference_ids(name: str, request: dict) -> list[int]:
    """Token ids by the processing of transformers, with the checkpoint's files."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / name)
    template = json.loads((ROOT / name / "chat_template.json").read_text())["chat_template"]
    text = tokenizer.apply_chat_template(
        request["messages"], chat_template=template, tokenize=False, add_generation_prompt=True
    )
    images = [part["image"] for message in request["messages"] for part in message["content"] if "image" in part]
    grids = Qwen2VLImageProcessorPil.from_pretrained(ROOT / name)(images)["image_grid_thw"] if images else []
    for grid in grids:
        text = text.replace("<|image_pad|>", "<|placeholder|>" * (prod(map(int, grid)) // 4), 1)
    return tokenizer(text.replace("<|placeholder|>", "<|image_pad|>"))["input_ids"]


REQUESTS = {
    "text": ask("What is the capital of France? 你好, naïve café 🙂 1234"),
    "one": ask(noise_image(150, 90), "Describe this image."),
    "two": ask("First: ", noise_image(60, 133), " then: ", noise_image(99, 64), " what changed?"),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_ids_equal_transformers(kind, tiny):
    name, llm = tiny
    assert llm.processor(REQUESTS[kind]).token_ids == reference_ids(name, REQUESTS[kind])


def test_special_tokens_have_their_published_ids(tiny):
    llm = tiny[1]
    assert llm.tokenizer(MARKED_UP)["input_ids"] == MARKED_UP_IDS
    assert llm.tokenizer.decode(MARKED_UP_IDS, skip_special_tokens=True) == "user\nDescribe this image.\n"
    ids = llm.processor(REQUESTS["one"]).token_ids
    start, end = ids.index(151652), ids.index(151653)
    assert set(ids[start + 1 : end]) == {151655}
    assert ids[start - 3 : start] == MARKED_UP_IDS[:3] and ids[end : end + 7] == MARKED_UP_IDS[5:]


def test_an_engine_with_published_ids_generates_for_images(tiny):
    llm = tiny[1]
    assert llm.engine.executor.sampler.eos_token_ids == {151645, 151643}
    outputs = llm.generate_multimodal(list(REQUESTS.values()), SamplingParams(max_tokens=2, ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [2, 2, 2]
    assert outputs[1].num_image_tokens == llm.processor(REQUESTS["one"]).token_ids.count(151655)


def test_quantized_weights_are_refused():
    config = load_config(ROOT / QUANTIZED)
    with pytest.raises(ValueError, match="is awq-quantized, which is not supported"):
        load_model(ROOT / QUANTIZED, config, torch.device("cpu"), torch.float32)
