"""Start-up of an engine: length limits, warm-up, and damaged or untrusted checkpoint folders."""

import contextlib
import json
import shutil

import pytest
from transformers import Qwen2VLProcessor

from mmvllm import LLM, RequestError, SamplingParams
from mmvllm.config import EngineConfig
from mmvllm.engine.tokenizer import load_tokenizer
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.models.shapes import every_family

GOOD = ask(noise_image(80, 60), "Describe this image.")


def test_max_model_len_must_fit_the_checkpoint_and_the_kv_cache(checkpoint, make_llm):
    with pytest.raises(ValueError, match="max_model_len is 2000; the checkpoint supports at most 1024"):
        make_llm(checkpoint, max_model_len=2000)
    with pytest.raises(ValueError, match="max_model_len is 500, but the KV cache holds 160 tokens"):
        make_llm(checkpoint, max_model_len=500, num_kvcache_blocks=10)
    short = make_llm(checkpoint, max_model_len=40)
    output = short.generate("Count.", SamplingParams(max_tokens=200, ignore_eos=True))[0]
    assert output.num_prompt_tokens + len(output.token_ids) == 40 and output.finish_reason == "length"


@pytest.mark.thinned(4)
@every_family
@pytest.mark.parametrize("max_model_len", [2, 3, 5])
def test_warm_up_with_the_shortest_max_model_len(max_model_len, checkpoint, make_llm):
    llm = make_llm(checkpoint, max_model_len=max_model_len, skip_warmup=False, encoder_cache_bytes=1)
    assert len(llm.generate([[5]], SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids) == max_model_len - 1


def test_no_remote_code_runs_even_if_confirmed_interactively(checkpoint, tmp_path, monkeypatch):
    shutil.copytree(checkpoint, tmp_path / "evil")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.T", "evil.T"]}}
    (tmp_path / "evil" / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    with contextlib.suppress(ValueError):
        LLM(tmp_path / "evil", skip_warmup=True, num_kvcache_blocks=64).exit()
    assert not (tmp_path / "ran").exists()


def test_a_chat_template_is_the_given_one_or_that_of_a_processor(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "two")
    own = load_tokenizer(folder).chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert load_tokenizer(folder).chat_template == "{{ messages[0].content }}" != own
    assert Qwen2VLProcessor.get_processor_dict(str(folder))[0]["chat_template"] == "{{ messages[0].content }}"
    (tmp_path / "own.jinja").write_text("{{ messages[1].content }}")
    for given in (tmp_path / "own.jinja", str(tmp_path / "own.jinja"), "{{ messages[1].content }}"):
        assert load_tokenizer(folder, given).chat_template == "{{ messages[1].content }}"
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for given in (tmp_path / "none.jinja", "none.jinja", tmp_path, tmp_path / "binary"):
        with pytest.raises(ValueError, match=r"chat_template: .* cannot be read .*; give a file or a Jinja template"):
            load_tokenizer(folder, given)
    for given in ("", 5):
        with pytest.raises(ValueError, match="must be a file or a Jinja template"):
            EngineConfig(chat_template=given)


def test_a_damaged_chat_template_file_is_named(checkpoint, make_llm, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "damaged")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert make_llm(folder).processor(GOOD).token_ids == make_llm(checkpoint).processor(GOOD).token_ids
    for content in ("{", "[]", "{}", "[" * 100_000):
        (folder / "chat_template.json").write_text(content)
        with pytest.raises(ValueError, match=r"chat_template.json is damaged"):
            make_llm(folder)


def test_a_special_token_that_is_a_text_is_refused(checkpoint, make_llm, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "long")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "e" * 1001}))
    with pytest.raises(ValueError, match=r"long has a special token of 1001 characters, 'e+; at most 1000 are"):
        make_llm(folder)


@pytest.mark.parametrize("value", ["1", [], {}])
def test_a_length_that_is_no_number_is_refused(value, checkpoint, make_llm, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": value}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: model_max_length must be a number, got "):
        make_llm(folder)


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


def with_expression(checkpoint, folder, pattern: str):
    """A copy of a checkpoint whose tokenizer splits texts by an expression."""
    shutil.copytree(checkpoint, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    split = SPLIT | {"pattern": {"Regex": pattern}}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())  # other classes have expressions of their own
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def test_an_expression_of_the_tokenizer_that_may_take_for_ever_is_refused(checkpoint, make_llm, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be used: the expression '\(a\+\)\+\$' repeats a group"):
        make_llm(with_expression(checkpoint, tmp_path / "slow", "(a+)+$"))
    tokenizer = json.loads((tmp_path / "slow" / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    tokenizer["added_tokens"][0] |= {"content": "a" * 40 + "b", "normalized": True, "special": False}
    (tmp_path / "slow" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="slow has no tokenizer that transformers can load: "):
        make_llm(tmp_path / "slow")


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_without_the_files_of_a_tokenizer_is_refused(is_link, checkpoint, make_llm, tmp_path):
    """Transformers makes an empty tokenizer of it, for which every text is nothing."""
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (folder / "tokenizer.json").unlink()
    if is_link:  # as an interrupted download leaves it
        (folder / "tokenizer.json").symlink_to("../../blobs/0123")
    with pytest.raises(ValueError, match=r"checkpoint has no tokenizer: tokenizer\.json, or vocab\.json and merges"):
        make_llm(folder)


@pytest.mark.slow
def test_a_text_that_the_tokenizer_gives_up_is_refused(checkpoint, make_llm, tmp_path):
    llm = make_llm(with_expression(checkpoint, tmp_path / "slow", "a*a*a*a*a*a*b"))
    text = "a" * 500 + "cb"
    for ask_for in (llm.generate, lambda text: llm.chat([{"role": "user", "content": text}])):
        for prompt in (text, f"<|im_start|>{text}"):
            with pytest.raises(RequestError, match="tokenizer cannot split the text"):
                ask_for(prompt)
    assert llm.generate("b", SamplingParams(max_tokens=1))[0].error is None


def test_image_settings_that_do_not_fit_the_vit_are_refused(checkpoint, make_llm, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "other")
    (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16}))
    with pytest.raises(ValueError, match=r"\(16, 2, 2\), vision_config needs \(14, 2, 2\)"):
        make_llm(folder)
