"""`mmvllm info`: versions, devices, attention backends with reasons, and the KV cache."""

import platform
import shutil

import pytest
import torch

import mmvllm
from mmvllm.cli.main import main


@pytest.fixture
def info(checkpoint, capsys):
    """Run `mmvllm info` -> exit code, {title: {name: value}}, stderr."""

    def run(*args: str, model=checkpoint) -> tuple[int, dict, str]:
        code = main(["info", "--model", str(model), "--device", "cpu", *args])
        out, err = capsys.readouterr()
        sections, title = {}, ""
        for line in out.splitlines():
            if line.startswith("  "):
                sections[title][line[2:18].strip()] = line[18:].strip()
            else:
                title = line
                sections[title] = {}
        return code, sections, err

    return run


def test_versions_and_devices(info):
    code, sections, err = info()
    assert (code, err) == (0, "")
    assert sections["versions"]["mmvllm"] == mmvllm.__version__
    assert sections["versions"]["python"] == platform.python_version()
    assert sections["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert "flash-attn" in sections["versions"]
    assert f"{torch.get_num_threads()} threads" in sections["devices"]["cpu"]


def test_model(info, checkpoint):
    sections = info()[1]
    assert sections["model"]["folder"] == str(checkpoint)
    assert sections["model"]["architecture"] == "Qwen2VLForConditionalGeneration"
    assert sections["model"]["runs in"] == "float32 on cpu"
    assert info("--dtype", "bfloat16")[1]["model"]["runs in"] == "bfloat16 on cpu"


def test_attention_backends_come_with_reasons(info):
    attention = info()[1]["attention"]
    assert attention["flash"] == "needs a CUDA device, this is cpu"
    assert attention["torch"] == "usable"
    assert attention["chosen"].startswith("torch (flash needs a CUDA device")


@pytest.mark.parametrize(("block_size", "dtype", "value_bytes"), [(16, "float32", 4), (64, "float16", 2)])
def test_kv_blocks(block_size, dtype, value_bytes, info):
    """The tiny model has 2 layers with 2 KV heads of 16."""
    memory = info("--block-size", str(block_size), "--dtype", dtype)[1]["memory"]
    block_bytes = 2 * 2 * 2 * 16 * value_bytes * block_size
    num_blocks = 64 * 1024 // block_size  # 64 sequences of 1024 tokens, which take less than cpu_kvcache_bytes
    size = f"{num_blocks * block_bytes / 2**20:.1f} MiB"
    assert memory["KV block"] == f"{block_bytes / 1024:.1f} KiB for {block_size} tokens"
    assert memory["KV cache"] == f"{num_blocks} blocks, 65536 tokens, {size}"


def test_the_blocks_are_those_that_an_engine_gets(info, checkpoint, make_llm):
    llm = make_llm(checkpoint, num_kvcache_blocks=None, kvcache_block_size=256)
    blocks = info("--block-size", "256")[1]["memory"]["KV cache"].split()[0]
    assert int(blocks) == llm.engine.model_runner.num_blocks


def test_weights_need_not_be_there(info, checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    code, sections, _ = info(model=tmp_path)
    assert code == 0
    assert sections["memory"]["weights"] == info()[1]["memory"]["weights"]


def test_the_bundled_model_is_the_default(capsys):
    assert main(["info", "--device", "cpu"]) == 0
    assert "assets/demo" in capsys.readouterr().out.replace("\\", "/")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/model"], "model '/no/such/model' is neither a local folder nor a hub id"),
        (["--device", "mps"], "device is 'mps', must be 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        (["--dtype", "int8"], "dtype is 'int8', must be"),
        (["--block-size", "0"], "kvcache_block_size is 0, must be an integer of at least 1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_values_end_with_a_message(arguments, message, info):
    code, sections, err = info(*arguments)
    assert (code, sections) == (2, {})
    assert err.startswith("mmvllm info: ") and message in err
