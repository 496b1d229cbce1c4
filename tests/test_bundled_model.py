"""The folder of the bundled model, as other programs read it."""

import json
import tomllib
from pathlib import Path

from transformers import AutoTokenizer, Qwen2VLProcessor

from mmvllm.models.folder import BUNDLED

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = json.loads((BUNDLED / "tokenizer_config.json").read_text())["chat_template"]


def test_the_chat_template_is_a_file_too():
    assert (BUNDLED / "chat_template.jinja").read_text() == TEMPLATE
    assert AutoTokenizer.from_pretrained(BUNDLED).chat_template == TEMPLATE
    assert Qwen2VLProcessor.get_processor_dict(str(BUNDLED))[0]["chat_template"] == TEMPLATE


def test_the_wheel_contains_the_folder():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mmvllm"]
    packaged = {path for pattern in patterns for path in (ROOT / "mmvllm").glob(pattern)}
    assert {*BUNDLED.iterdir()} <= packaged
