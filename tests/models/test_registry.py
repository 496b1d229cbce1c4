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
