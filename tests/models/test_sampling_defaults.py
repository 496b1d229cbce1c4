"""The sampling parameters of generation_config.json, of small files and of published checkpoints."""

from pathlib import Path

import pytest

from mmvllm.models.folder import BUNDLED
from mmvllm.models.registry import load_config
from tests.helpers.models.generation import QWEN2_5_VL, QWEN2_VL, QWEN3_VL, bundled_with
from tests.helpers.models.metadata import ROOT, needs_metadata


def defaults(folder: Path) -> dict:
    config = load_config(folder)
    hash(config)  # it stays a value that cannot change
    return dict(config.sampling_defaults)


@pytest.mark.parametrize(
    ("generation", "want"),
    [
        ({}, {}),
        ({"eos_token_id": 3, "do_sample": None, "temperature": None}, {}),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.9, "top_k": 5}, {"temperature": 0.0, "top_k": 5}),
        ({"temperature": 1, "top_k": 0}, {"temperature": 1.0, "top_k": 0}),
        (
            {"min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": -1},
            {"min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": -1.0},
        ),
        ({"max_new_tokens": 7, "num_beams": 4, "length_penalty": 2.0}, {}),
    ],
    ids=str,
)
def test_values_are_read(generation, want, tmp_path):
    assert defaults(bundled_with(tmp_path / "copy", generation)) == want


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number of at least 0, got 'hot'"),
        ({"temperature": -1}, "temperature must be a number .*, got -1"),
        ({"top_p": 1.5}, "top_p must be a number in .*, got 1.5"),
        ({"top_p": True}, "top_p must be a number .*, got True"),
        ({"top_k": 2.5}, "top_k must be an integer .*, got 2.5"),
        ({"min_p": [0.1]}, "min_p must be a number .*, got .*"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0, got 0"),
        ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
        ({"do_sample": False, "temperature": "hot"}, "temperature must be .*, got 'hot'"),
        ('{"temperature": NaN}', "temperature must be a number .*, got nan"),
        ('{"temperature": 1e999}', "temperature must be a number .*, got inf"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_its_file(generation, message, tmp_path):
    folder = bundled_with(tmp_path / "copy", generation)
    with pytest.raises(ValueError, match=rf"{tmp_path}.*generation_config\.json's {message}"):
        load_config(folder)


def test_the_bundled_model_gives_none():
    assert defaults(BUNDLED) == {}


PUBLISHED = {
    "Qwen2-VL-2B-Instruct": QWEN2_VL,
    "Qwen2-VL-2B-Instruct-AWQ": QWEN2_VL,
    "Qwen2-VL-7B-Instruct": QWEN2_VL,
    "Qwen2.5-VL-3B-Instruct": QWEN2_5_VL,
    "Qwen2.5-VL-7B-Instruct": QWEN2_5_VL,
    "Qwen2.5-VL-7B-Instruct-AWQ": QWEN2_VL | {"repetition_penalty": 1.05, "temperature": 0.1},
    "olmOCR-2-7B-1025-FP8": QWEN2_5_VL,
    "Qwen3-4B": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "Qwen3-VL-2B-Instruct": QWEN3_VL,
    "Qwen3-VL-4B-Instruct": QWEN3_VL,
    "Qwen3-VL-8B-Instruct": QWEN3_VL,
}


@needs_metadata
@pytest.mark.parametrize("name", PUBLISHED)
def test_values_of_published_checkpoints(name, tmp_path):
    want = {key: value for key, value in PUBLISHED[name].items() if key != "do_sample"}
    folder = bundled_with(tmp_path / "copy", (ROOT / name / "generation_config.json").read_text())
    assert defaults(folder) == want
