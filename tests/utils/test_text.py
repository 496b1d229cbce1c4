"""Texts and files of JSON that others have written: what they may have, and what is made of it."""

import shutil
import time

import pytest

from mmvllm.config import EngineConfig
from mmvllm.engine.tokenizer import load_tokenizer
from mmvllm.models.folder import BUNDLED
from mmvllm.models.lora import read_adapter
from mmvllm.utils import text
from mmvllm.utils.text import load_json, with_whole_characters
from mmvllm.worker.checkpoint import read_checkpoint


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


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
        *("merges.txt", "chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer.model"),
        *("spiece.model", "vocab.txt", "source.spm", "tekken.json"),
    ],
)
def test_files_of_a_tokenizer_have_a_largest_size(name, monkeypatch, tmp_path):
    """transformers reads them whole, and a file without blocks on the disk may have any size."""
    folder = shutil.copytree(BUNDLED, tmp_path / "model")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ValueError, match=rf"{name} cannot be used: it has more than 64 MiB"):
        load_tokenizer(folder)


def test_the_config_of_an_adapter_has_a_largest_size(mebibyte, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}" + mebibyte)
    with pytest.raises(ValueError, match=r"adapter_config.json cannot be read: it has more than 1 MiB"):
        read_adapter(tmp_path)


def test_halves_of_surrogate_pairs_are_replaced_and_pairs_become_characters():
    given = {"a\ud800": ["\udc00\ud83d\ude00\ud83d", 1, None, ("é", "x\ud83d\ud83d\ude00y")]}
    assert with_whole_characters(given) == {"a\ufffd": ["\ufffd😀\ufffd", 1, None, ["é", "x\ufffd😀y"]]}


@pytest.mark.parametrize("value", ["\ud800" * 4_000_000, ["\ud800"] * 500_000], ids=["one text", "many texts"])
def test_millions_of_halves_take_no_seconds(value):
    begin = time.thread_time()
    with_whole_characters(value)
    assert time.thread_time() - begin < 1.0  # 1.4 and 3 s by a codec, which no other thread can interrupt
