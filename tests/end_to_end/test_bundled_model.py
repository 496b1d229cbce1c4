"""The folder of the bundled model, as other programs read it."""

import json
import random
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen2VLProcessor

from mmvllm import SamplingParams
from mmvllm.models.folder import BUNDLED
from tests.helpers.engine.requests import ask, noise_image

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = json.loads((BUNDLED / "tokenizer_config.json").read_text())["chat_template"]


def test_the_chat_template_is_a_file_too():
    assert (BUNDLED / "chat_template.jinja").read_text() == TEMPLATE
    assert AutoTokenizer.from_pretrained(BUNDLED).chat_template == TEMPLATE
    assert Qwen2VLProcessor.get_processor_dict(str(BUNDLED))[0]["chat_template"] == TEMPLATE


def test_the_wheel_contains_the_folder():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mmvllm"]
    packaged = {path for pattern in patterns for path in (ROOT / "mmvllm").glob(pattern)}
    assert {*BUNDLED.iterdir()} <= packaged


@pytest.fixture
def scenes(monkeypatch):
    """The module that draws and describes the model's kind of images."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    return import_module("scenes")


@pytest.mark.slow
def test_captions_of_other_images_end_early(make_llm):
    llm = make_llm(BUNDLED)
    requests = [ask(noise_image(300, 200, seed=seed)) for seed in range(4)]
    outputs = llm.generate_multimodal(requests, SamplingParams(max_tokens=200))
    assert {output.finish_reason for output in outputs} == {"length"}
    assert {len(output.token_ids) for output in outputs} == {48}
    (whole,) = llm.generate_multimodal(requests[:1], SamplingParams(max_tokens=60, ignore_eos=True))
    assert len(whole.token_ids) == 60 and whole.token_ids[:48] == outputs[0].token_ids
    (short,) = llm.generate_multimodal(requests[:1], SamplingParams(max_tokens=5))
    assert short.token_ids == whole.token_ids[:5]


@pytest.mark.slow
def test_the_limit_leaves_room_for_captions_of_scenes(scenes):
    limit = json.loads((BUNDLED / "generation_config.json").read_text())["max_new_tokens"]
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    captions = [scenes.describe(scenes.random_scene(random.Random(seed))) for seed in range(3000)]
    assert 1.5 * (1 + max(len(ids) for ids in tokenizer(captions)["input_ids"])) <= limit
