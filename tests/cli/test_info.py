"""`mmvllm info`: versions, devices, what is supported for a model, attention backends with reasons, and memory."""

import json
import platform
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

import mmvllm
from mmvllm.cli.info_memory import Memory
from mmvllm.cli.main import main
from mmvllm.config import EngineConfig
from mmvllm.layers.attention import TorchAttention
from mmvllm.models.registry import load_config
from tests.cli.info_output import sections_of

BY_DTYPE = "memory needed on cpu, by dtype"


@pytest.fixture
def info(checkpoint, capsys):
    """Run `mmvllm info` -> exit code, {title: {name: value}}, stderr."""

    def run(*args: str, model=checkpoint) -> tuple[int, dict, str]:
        code = main(["info", "--model", str(model), "--device", "cpu", *args])
        out, err = capsys.readouterr()
        return code, sections_of(out), err

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


@pytest.mark.parametrize(
    ("shape", "family", "side", "tokens"),
    [
        ("gqa2-tied", "qwen2_vl", 28, "4 to 25"),
        ("windows4-tied", "qwen2_5_vl", 28, "4 to 25"),
        ("deepstack3-tied", "qwen3_vl", 32, "4 to 25"),
    ],
)
def test_what_a_model_is_and_supports(shape, family, side, tokens, info, checkpoints):
    model = info(model=checkpoints(shape))[1]["model"]
    assert model["family"] == family
    assert model["images"] == f"one token per {side}x{side} pixels; {tokens} tokens each"
    assert model["context"] == "1024 tokens at most in one sequence"
    assert model["videos"].startswith("60 seconds of 1280x720 are 120 frames and ")
    assert model["weights"] == "not quantized"


def test_parameters_by_part(info, checkpoints):
    folder = checkpoints("deepstack3-tied")
    numbers = {name: tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items()}
    vision = sum(number for name, number in numbers.items() if "visual" in name)
    whole = sum(numbers.values())
    expected = f"{whole / 1e6:.1f} M (ViT {vision / 1e6:.1f} M, decoder {(whole - vision) / 1e6:.1f} M)"
    assert info(model=folder)[1]["model"]["parameters"] == expected


def test_experts_in_use(info, checkpoints):
    parameters = info(model=checkpoints("experts8-top3"))[1]["model"]["parameters"]
    assert re.search(r"; (\d\.\d) M in experts, (\d\.\d) M active: 3 of 8 experts in a layer$", parameters)


def test_a_text_only_model_takes_no_images(info, checkpoints):
    sections = info(model=checkpoints("qwen3-mqa-untied"))[1]
    assert sections["model"]["images"] == "none: this checkpoint is text-only"
    assert sections["model"]["videos"] == "none: this checkpoint is text-only"
    assert "encoder cache" not in sections[BY_DTYPE]["float32"]


def test_quantized_checkpoints_are_described_or_refused(info, checkpoint, tmp_path):
    raw = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "awq"}}))
    assert info(model=tmp_path)[1]["model"]["weights"] == "awq (4-bit integers)"
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "hqq"}}))
    code, sections, err = info(model=tmp_path)
    assert (code, sections) == (2, {}) and "is quantized with 'hqq', which is not supported" in err


def test_memory_by_dtype(info):
    """Weights, the KV cache and the encoder cache; the kinds of quantization are a CPU's."""
    sizes = ("--cpu-kvcache-bytes", str(64 * 2**20), "--encoder-cache-bytes", str(32 * 2**20))
    rows = info(*sizes)[1][BY_DTYPE]
    assert list(rows) == ["float32", "bfloat16", "float16", "int8", "int4"]
    for row in rows.values():
        total, *parts = map(float, re.findall(r"([\d.]+) GiB", row))
        assert total == pytest.approx(sum(parts), abs=0.02)
        assert "encoder cache 0.03 GiB" in row and len(parts) == 4


@pytest.mark.parametrize(
    ("shape", "expected"), [("gqa2-tied", r"[\d.]+ GiB = weights"), ("experts8-top3", ".* mixtures")]
)
def test_memory_by_dtype_on_a_gpu(shape, expected, checkpoints):
    """Weights and the encoder cache; the kinds of quantization of a GPU, or why they are not supported."""
    memory = Memory(load_config(checkpoints(shape)), EngineConfig(), TorchAttention, torch.device("cuda"))
    rows = memory.by_dtype()
    assert list(rows) == ["float32", "bfloat16", "float16", "fp8", "int4"]
    assert re.match(expected, rows["fp8"])


def test_attention_backends_come_with_reasons(info):
    attention = info()[1]["attention"]
    assert attention["flash"] == "needs a CUDA device, this is cpu"
    assert attention["torch"] == "usable"
    assert attention["chosen for ViT"].startswith("torch (flash needs a CUDA device, this is cpu")
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
        (["--block-size", "0"], "kvcache_block_size must be an integer of at least 1, got 0"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_values_end_with_a_message(arguments, message, info):
    code, sections, err = info(*arguments)
    assert (code, sections) == (2, {})
    assert err.startswith("mmvllm info: ") and message in err
