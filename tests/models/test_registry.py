"""The registry names the package of each architecture, and the family there serves it."""

import json

import pytest

from mmvllm.models.registry import FAMILIES, family_of, load_config


def test_families_serve_the_architectures_that_name_them():
    served = {name: family_of(name) for name in FAMILIES}
    assert all(name in family.architectures for name, family in served.items())
    assert set(FAMILIES) == {name for family in served.values() for name in family.architectures}


def test_other_architectures_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match=r"config\.json: architecture 'LlamaForCausalLM' is not supported"):
        load_config(tmp_path)


@pytest.mark.parametrize("architectures", ["LlamaForCausalLM", {"a": 1}, [["x"]], 5], ids=str)
def test_what_is_no_list_of_architectures_is_refused(architectures, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    with pytest.raises(ValueError, match=r"config\.json: architectures must be a list of names, got .*"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "sibling"),
    [
        ("Qwen3_5ForConditionalGeneration", "Qwen3VLForConditionalGeneration"),
        ("Qwen3_5MoeForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        ("Qwen3MoeForCausalLM", "Qwen3ForCausalLM"),
        ("Qwen2MoeForCausalLM", "Qwen2ForCausalLM"),
        ("Qwen2_5OmniForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    ],
)
def test_a_refusal_names_the_nearest_supported_architecture(architecture, sibling, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(ValueError, match=f"the nearest to it is {sibling}$"):
        load_config(tmp_path)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "QwenForCausalLM", "LlavaQwen2ForCausalLM"])
def test_a_refusal_names_no_sibling_of_another_lineage(architecture, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(ValueError) as error:
        load_config(tmp_path)
    assert "nearest" not in str(error.value)
