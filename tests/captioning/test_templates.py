"""The chat template of a job is one of its settings; it may take strings only, but has to be there."""

import json
import shutil

import pytest

from mmvllm import LLM
from mmvllm.captioning import caption_images
from mmvllm.cli.main import main
from mmvllm.errors import ArgumentError
from mmvllm.models.folder import BUNDLED
from tests.helpers.engine.requests import noise_image

OPTIONS = {"device": "cpu", "num_kvcache_blocks": 64, "skip_warmup": True}
STRINGS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BEGUN = STRINGS.replace("assistant\\n", "assistant\\nThree red ")


@pytest.fixture
def image(tmp_path):
    noise_image(60, 64).save(tmp_path / "a.png")
    return tmp_path / "a.png"


@pytest.fixture
def bare(tmp_path):
    """A copy of the bundled checkpoint without a chat template."""
    folder = shutil.copytree(BUNDLED, tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_template_is_a_setting(image, tmp_path):
    (tmp_path / "begun.jinja").write_text(BEGUN)
    output, path = tmp_path / "captions.jsonl", tmp_path / "begun.jinja"
    given = {"engine_args": OPTIONS, "max_tokens": 9, "system": "You are a helpful assistant."}
    plain, strings, begun = (
        next(iter(caption_images(image, **given, **own)))["caption"]
        for own in ({}, {"chat_template": STRINGS}, {"chat_template": BEGUN})
    )
    assert plain == strings != begun
    (record,) = caption_images(image, output=output, chat_template=path, **given)
    assert record["caption"] == begun
    assert list(caption_images(image, output=output, chat_template=path, **given)) == []
    with pytest.raises(ValueError, match=r"chat_template was '.*begun.jinja', is None"):
        caption_images(image, output=output, **given)
    with LLM(**OPTIONS, chat_template=path) as llm:
        own = {name: value for name, value in given.items() if name != "engine_args"}
        assert list(caption_images(image, output=output, llm=llm, **own)) == []


@pytest.mark.parametrize("in_processes", [pytest.param(True, marks=pytest.mark.spawns), False])
def test_a_checkpoint_without_a_template_is_refused_before_the_job_begins(bare, image, in_processes):
    given = {"model": bare, "engine_args": OPTIONS, "worker_processes": in_processes, "max_tokens": 3}
    with pytest.raises(ArgumentError, match=r"no image can be captioned: .*chat_template is not set"):
        caption_images(image, **given)
    (record,) = caption_images(image, **given, chat_template=STRINGS)
    assert record["error"] is None


def test_the_command_says_it_in_one_line(bare, image, capsys):
    command = ["caption", str(image), "--model", str(bare), "--device", "cpu"]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "no image can be captioned: the chat template cannot render" in line
    assert main([*command, "--chat-template", str(image.parent / "none.jinja")]) == 2
    assert "none.jinja cannot be read" in capsys.readouterr().err
