"""Text files that people write, in the encodings of the editors of Windows: at every door the mark is no text."""

import argparse
import codecs
import json
import shutil
from collections.abc import Callable

import pytest

from mmvllm.captioning.sources.context import read_context
from mmvllm.captioning.sources.find import find_items
from mmvllm.captioning.sources.items import Item
from mmvllm.cli import caption, demo
from mmvllm.config import EngineConfig
from mmvllm.engine.tokenizer import load_tokenizer
from mmvllm.models.folder import BUNDLED
from mmvllm.models.lora import read_adapter
from mmvllm.utils.text import read_text
from mmvllm.worker.checkpoint import read_checkpoint
from tests.helpers.engine.requests import noise_image

TEXT = "Wie heißt das Tier?\r\n猫 🐈\r\n"
ENCODINGS: dict[str, Callable[[str], bytes]] = {
    "UTF-8": str.encode,
    "UTF-8 with a mark": lambda text: codecs.BOM_UTF8 + text.encode(),
    "UTF-16, little-endian": lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
    "UTF-16, big-endian": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
}
every_encoding = pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
REASON = "it is text neither in UTF-8 nor in UTF-16 with a byte order mark; save it as UTF-8"


def arguments(**given) -> argparse.Namespace:
    names = ("prompt", "prompts", "prompt_file", "preset", "schema", "auth", "auth_file")
    return argparse.Namespace(**dict.fromkeys(names) | given)


@every_encoding
def test_options_of_a_file(encode, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(encode(TEXT))
    assert read_text(path) == TEXT
    assert caption._prompts(arguments(prompt_file=path)) == {"prompt": TEXT.strip()}
    path.write_bytes(encode(json.dumps([TEXT, "b"], ensure_ascii=False)))
    assert caption._prompts(arguments(prompts=path)) == {"prompts": [TEXT, "b"]}
    schema = json.dumps({"type": "object", "title": TEXT}, ensure_ascii=False)
    path.write_bytes(encode(schema))
    assert caption._schema(arguments(schema=path)) == schema
    path.write_bytes(encode("änn:a\r\nbob:b\r\n"))
    assert demo._users(arguments(auth_file=path)) == [("änn", "a"), ("bob", "b")]
    path.write_bytes(encode("{{ '猫' }}"))
    assert load_tokenizer(BUNDLED, path).chat_template == "{{ '猫' }}"


@pytest.mark.parametrize("content", [b"\xe4nn:secret", codecs.BOM_UTF16_LE + b"abc"])
def test_another_encoding_is_refused_with_the_name_of_the_file(content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    calls = {
        "--prompt-file": lambda: caption._prompts(arguments(prompt_file=path)),
        "--prompts": lambda: caption._prompts(arguments(prompts=path)),
        "--schema": lambda: caption._schema(arguments(schema=path)),
        "--auth-file": lambda: demo._users(arguments(auth_file=path)),
    }
    for option, call in calls.items():
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value) == f"{option} {path} cannot be read: {REASON}"
        assert raised.value.__suppress_context__


@every_encoding
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["list.txt", "list.jsonl"])
def test_a_list(name, end, encode, tmp_path):
    lines = ["ä 猫.png", "a.png", "b\u2028c.png"]
    texts = lines if name.endswith(".txt") else [json.dumps({"image": one}, ensure_ascii=False) for one in lines]
    (tmp_path / name).write_bytes(encode(end.join(texts) + end))
    for one in lines:
        noise_image(8, 8).save(tmp_path / one)
    items = list(find_items([tmp_path / name]))
    assert [(item.path, item.error) for item in items] == [(str(tmp_path / one), None) for one in lines]


@every_encoding
def test_the_text_beside_an_image(encode, tmp_path):
    image = tmp_path / "a.png"
    image.with_suffix(".tags").write_bytes(encode(TEXT))
    assert read_context(Item(str(image), "a.png", str(image)), ".tags", 10) == TEXT.strip()
    image.with_suffix(".tags").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=rf"a\.tags: the context cannot be read \({REASON}\)"):
        read_context(Item(str(image), "a.png", str(image)), ".tags", 10)


@every_encoding
@pytest.mark.parametrize("name", ["generation_config.json", "preprocessor_config.json"])
def test_a_config_of_a_checkpoint(name, encode, tmp_path):
    folder = shutil.copytree(BUNDLED, tmp_path / "model")
    (folder / name).write_bytes(encode((folder / name).read_text()))
    config = EngineConfig(device="cpu")
    assert read_checkpoint(folder, config).model_config == read_checkpoint(BUNDLED, config).model_config


@every_encoding
def test_the_config_of_an_adapter(encode, tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(encode(json.dumps({"peft_type": "猫"}, ensure_ascii=False)))
    with pytest.raises(ValueError, match="has the peft_type '猫'; only 'LORA' is supported"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("encode", [*ENCODINGS.values()][1:], ids=[*ENCODINGS][1:])
def test_a_file_that_transformers_reads_is_refused_by_name(name, encode, tmp_path):
    """It would fail there, or begin each prompt with U+FEFF."""
    folder = shutil.copytree(BUNDLED, tmp_path / "model")
    path = folder / name
    path.write_bytes(encode(path.read_text(encoding="utf-8")))
    with pytest.raises(ValueError, match=rf"{name} begins with a byte order mark; save it as UTF-8 without one"):
        load_tokenizer(folder)
