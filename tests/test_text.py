"""Files of JSON that others have written are read up to a limit."""

import shutil

import pytest

from mmvllm import text
from mmvllm.config import EngineConfig
from mmvllm.engine.checkpoint import read_checkpoint
from mmvllm.models.folder import BUNDLED
from mmvllm.models.lora import read_adapter
from mmvllm.text import load_json


@pytest.fixture
def mebibyte(monkeypatch):
    monkeypatch.setattr(text, "MAX_JSON_BYTES", 1 << 20)
    return " " * (1 << 20)


def test_a_json_file_has_a_largest_size(mebibyte, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("1" + mebibyte[1:])
    assert load_json(path) == 1
    path.write_text("1" + mebibyte)
    with pytest.raises(ValueError, match="it has more than 1 MiB"):
        load_json(path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "preprocessor_config.json"])
def test_files_of_a_checkpoint_have_a_largest_size(name, mebibyte, tmp_path):
    folder = shutil.copytree(BUNDLED, tmp_path / "model")
    (folder / name).write_text((BUNDLED / name).read_text() + mebibyte)
    with pytest.raises(ValueError, match=rf"{name} is damaged: .*it has more than 1 MiB"):
        read_checkpoint(folder, EngineConfig(device="cpu"))


def test_the_config_of_an_adapter_has_a_largest_size(mebibyte, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}" + mebibyte)
    with pytest.raises(ValueError, match=r"adapter_config.json cannot be read: it has more than 1 MiB"):
        read_adapter(tmp_path)
