"""LoRA adapters merged at load give PEFT's own merged weights; other adapters are refused by name."""

import json
import math
import re
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmvllm.layers.attention import TorchAttention
from mmvllm.lora.device_adapters import DeviceAdapters
from mmvllm.models import lora as lora_module
from mmvllm.models.lora import linear_regions
from mmvllm.models.registry import family_of, load_config
from tests.helpers.cpu import NEEDS_BFLOAT16, kinds
from tests.helpers.models.adapters import DECODER, MLP, VISION, make_adapter, merged_checkpoint, rename_tensors
from tests.helpers.models.packing import pack_weights
from tests.helpers.models.ranks import on_ranks
from tests.helpers.models.shapes import RICHEST
from tests.helpers.models.weights import assert_same, load, state

SLOW = r"(?:\w|\w\w|.)*\d"  # matches a module's name for longer than anybody waits
CONFIGS = {
    "attention": {"target_modules": DECODER},
    "decoder, rslora": {"target_modules": DECODER + MLP, "use_rslora": True},
    "every linear layer": {"target_modules": "all-linear", "r": 3, "lora_alpha": 7},
    "ViT": {"target_modules": VISION},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "qkv", "patch_embed.proj"],
        "rank_pattern": {"q_proj": 2, r"layers\.0\.self_attn\.v_proj": 5},
        "alpha_pattern": {"v_proj": 3, "qkv": 1},
    },
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shape", RICHEST)
def test_merged_weights_are_those_of_peft(shape, kind, checkpoints, tmp_path):
    checkpoint = checkpoints(shape)
    adapter = make_adapter(tmp_path / "adapter", checkpoint, **CONFIGS[kind])
    merged = state(merged_checkpoint(tmp_path / "merged", checkpoint, adapter))
    plain, got = state(checkpoint), load(checkpoint, lora=adapter).state_dict()
    assert_same(got, merged)
    assert any(not torch.equal(got[name], plain[name]) for name in plain)


@pytest.mark.slow
def test_text_only(checkpoints, tmp_path):
    checkpoint = checkpoints("qwen2-gqa3-tied")
    adapter = make_adapter(tmp_path / "adapter", checkpoint, target_modules="all-linear")
    assert_same(
        load(checkpoint, lora=adapter).state_dict(), state(merged_checkpoint(tmp_path / "m", checkpoint, adapter))
    )


FIRST = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
FLOATS_OF_4_BITS = torch.ones(4, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("made") / "adapter", checkpoint, target_modules="all-linear")


@pytest.fixture
def adapter(made, tmp_path) -> Path:
    """An adapter of all linear layers, whose files the test may change."""
    return shutil.copytree(made, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("decoder", "visual"), [("model.", "visual."), ("language_model.model.", "visual.")], ids=["older", "4.52"]
)
def test_names_of_every_layout(decoder, visual, adapter, checkpoint):
    def rename(name: str) -> str:
        name = name.replace("base_model.model.model.language_model.", f"base_model.model.{decoder}")
        return name.replace("base_model.model.model.visual.", f"base_model.model.{visual}")

    want = load(checkpoint, lora=adapter).state_dict()
    assert_same(load(checkpoint, lora=rename_tensors(adapter, rename)).state_dict(), want)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("shape", ["gqa3-untied", "mha-untied"])
def test_ranks_merge_their_parts(shape, checkpoints, tmp_path):
    checkpoint = checkpoints(shape)
    adapter = make_adapter(tmp_path / "adapter", checkpoint, target_modules="all-linear")
    merged = merged_checkpoint(tmp_path / "merged", checkpoint, adapter)
    parts = on_ranks(2, lambda ranks: load(checkpoint, ranks=ranks, lora=adapter).state_dict())
    wanted = on_ranks(2, lambda ranks: load(merged, ranks=ranks).state_dict())
    for got, want in zip(parts, wanted, strict=True):
        for name in want:
            torch.testing.assert_close(got[name], want[name])


@NEEDS_BFLOAT16
@pytest.mark.thinned(1)
@pytest.mark.parametrize("quantization", kinds(["int8", "fp8"]))
def test_weights_are_merged_before_they_are_quantized(quantization, checkpoint, tmp_path, adapter):
    merged = merged_checkpoint(tmp_path / "merged", checkpoint, adapter)
    models = []
    for folder, lora in ((checkpoint, adapter), (merged, None)):
        models.append(load(folder, torch.bfloat16, lora=lora))
        pack_weights(models[-1], torch.bfloat16, quantization)
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    got, want = (model.decoder.layers[0].self_attn.qkv_proj(x)[0] for model in models)
    assert torch.equal(got, want)


def changed(adapter: Path, **values) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return adapter


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dora": True}, "has use_dora True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save ['lm_head'], which is not supported"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "has target_parameters ['mlp.experts.down_proj']"),
        ({"bias": "lora_only"}, "has bias 'lora_only'; only 'none' is supported"),
        ({"peft_type": "LOHA"}, "has the peft_type 'LOHA'; only 'LORA' is supported"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa', which changed the base model's weights"),
        ({"r": 5}, "lora_A and lora_B of shapes (4, 128) and (64, 4) for model.language_model.layers.0.mlp.down_proj"),
        ({"r": "4"}, "has r '4' and lora_alpha 8"),
        *(
            ({"lora_alpha": alpha}, "both must be numbers")
            for alpha in (float("nan"), float("inf"), 1e308, 10**400, "8")
        ),
        ({"r": 4097}, "at most 4096 is read"),
        ({"r": 10**400}, "at most 4096 is read"),
        ({"rank_pattern": {"(": 4}}, "is not valid: missing )"),
        ({"rank_pattern": {SLOW: 4}}, "takes too long to match"),
        ({"alpha_pattern": {SLOW: 4}}, "takes too long to match"),
        ({"target_modules": SLOW}, "takes too long to match"),
        ({"target_modules": "a{1000000000}"}, "has, with its repetitions"),
        ({"alpha_pattern": [1]}, "has alpha_pattern [1], which PEFT does not write"),
        ({"target_modules": ["q_proj"]}, "has tensors that target_modules does not name: model.language_model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_is_not_supported_is_refused_by_name(values, message, adapter, checkpoint, monkeypatch):
    monkeypatch.setattr("mmvllm.utils.patterns.MATCH_SECONDS", 0.1)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(checkpoint, lora=changed(adapter, **values))


@pytest.mark.parametrize("name", ["bias", "peft_type", "init_lora_weights"])
def test_a_long_value_is_cut_in_the_message(name, adapter, checkpoint):
    with pytest.raises(ValueError, match=r"^.{1,400}$"):
        load(checkpoint, lora=changed(adapter, **{name: "x" * 1_000_000}))


def declare(adapter: Path, shapes: dict[str, list[int]]) -> Path:
    """Have an adapter declare tensors of four bytes a value, none of which is in a block of the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    data = json.dumps(header).encode()
    with (adapter / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + end)
    return adapter


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            [[8, 1 << 28], [64, 8]],
            "has lora_A and lora_B of shapes (8, 268435456) and (64, 8) for model.language_model",
        ),
        ([[4, 1 << 28], [64, 4, 1, 1]], "is for another model: "),
        ([[4, 1 << 28], [64, 4]], "is for another model: "),
        ([[4, 64], [1 << 28, 4]], "is for another model: "),
        ([[0, 64], [64, 0]], "has tensors without values: base_model"),
        ([[0, 2**64 - 1], [64, 4]], "has tensors without values: base_model"),
    ],
)
def test_no_value_is_read_before_it_is_known_that_an_adapter_fits(shapes, message, adapter, checkpoint, monkeypatch):
    """A file of a few KiB may declare gigabytes."""
    monkeypatch.setattr(lora_module, "_read_values", None)
    declare(adapter, {FIRST.replace("lora_A", f"lora_{kind}"): shape for kind, shape in zip("AB", shapes, strict=True)})
    with pytest.raises(ValueError, match=re.escape(message)):
        load(checkpoint, lora=changed(adapter, target_modules=["q_proj"], r=4))


def test_an_adapter_of_very_many_tensors_is_refused_at_once(adapter, checkpoint):
    declare(adapter, {FIRST.replace("layers.0", f"layers.{i}"): [1, 1] for i in range(300_000)})
    begin = time.process_time()
    with pytest.raises(ValueError, match=r"must have at most 20,000 tensors, got 300,000"):
        load(checkpoint, lora=adapter)
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("number", [4, 61, 30_000])
def test_a_tensor_of_many_dimensions_is_refused_before_it_is_read(number, adapter, checkpoint):
    header = {"base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight": [4, 4] + [1] * number}
    made = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 64]} for name, shape in header.items()}
    data = json.dumps(made).encode()
    (adapter / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(64))
    begin = time.process_time()
    with pytest.raises(ValueError, match="has tensors of more than 5 dimensions: base_model"):
        load(checkpoint, lora=adapter)
    assert time.process_time() - begin < 5


def test_a_long_name_is_refused(adapter, checkpoint):
    save_file(
        {f"base_model.model.{'a.' * 1_000_000}lora_A.weight": torch.ones(4, 4)}, adapter / "adapter_model.safetensors"
    )
    begin = time.process_time()
    with pytest.raises(ValueError, match="names of tensors must have at most 500 characters, got 2000"):
        load(checkpoint, lora=adapter)
    assert time.process_time() - begin < 5


def test_many_targets_take_no_time(adapter, checkpoint):
    own = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    targets = [*own, *(f"name{i}" for i in range(300_000))]
    begin = time.process_time()
    load(checkpoint, lora=changed(adapter, target_modules=targets))
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("text", ["[" * 200_000, "{", "", "\xff", "[1]", "null", "5"])
def test_a_config_that_cannot_be_read_is_refused(text, adapter, checkpoint):
    (adapter / "adapter_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"adapter_config\.json (cannot be read|has the peft_type)"):
        load(checkpoint, lora=adapter)


def replaced(adapter: Path, change) -> Path:
    path = adapter / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    return adapter


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != FIRST}, "has only one of lora_A and lora_B for model.language"),
        (
            lambda t: {k.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): v for k, v in t.items()},
            "adapts model.language_model.layers.0.mlp.experts.0.up_proj, model.language_model.layers.1.mlp.experts",
        ),
        (lambda t: {k.replace("layers.0.", "layers.7."): v for k, v in t.items()}, "and no layer that the model lacks"),
        (
            lambda t: t | {"base_model.model.lm_head.weight": torch.ones(2)},
            "do not belong to LoRA layers: base_model.model",
        ),
        (
            lambda t: t | {FIRST.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(2)},
            "belong to LoRA layers: base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_magnitude",
        ),
        (
            lambda t: t | {k.replace(".language_model.", "."): v.clone() for k, v in t.items()},
            "adapts a layer twice, under names of two versions of transformers",
        ),
        (lambda t: {}, "has no tensors"),
        (lambda t: t | {FIRST: torch.tensor(1.0)}, f"has tensors of fewer than two dimensions: {FIRST}"),
        (lambda t: t | {FIRST: torch.ones(4)}, f"has tensors of fewer than two dimensions: {FIRST}"),
        (lambda t: t | {FIRST: t[FIRST] / 0}, f"has NaN or infinity in {FIRST}"),
        (lambda t: t | {FIRST: t[FIRST] * torch.nan}, f"has NaN or infinity in {FIRST}"),
        (lambda t: t | {FIRST: t[FIRST].int()}, f"do not belong to LoRA layers: {FIRST}"),
        *(
            (lambda t, dtype=dtype: t | {FIRST: t[FIRST].to(dtype)}, f"do not belong to LoRA layers: {FIRST}")
            for dtype in (torch.complex64, torch.float8_e4m3fn)
        ),
        (lambda t: t | {FIRST: FLOATS_OF_4_BITS}, f"do not belong to LoRA layers: {FIRST}"),
    ],
    ids=[
        *("half", "experts", "layer", "head", "magnitude", "twice", "empty"),
        *("0-d", "1-d", "infinity", "NaN", "int", "complex", "fp8", "fp4"),
    ],
)
def test_tensors_that_are_not_supported_are_refused_by_name(change, message, adapter, checkpoint):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(checkpoint, lora=replaced(adapter, change))


@pytest.mark.parametrize("shape", ["gqa2-tied", "gqa3-untied"])
def test_the_head_is_not_adapted(shape, checkpoints):
    config = load_config(checkpoints(shape))
    with torch.device("meta"):
        model = family_of(config.architecture).build(config, TorchAttention)
    DeviceAdapters(model, 1, 8, torch.float32, torch.device("cpu"))
    assert model.lm_head.adapters is None
    assert ("lm_head.weight", None) not in linear_regions(model)
    assert model.decoder.layers[0].mlp.down_proj.adapters is not None


def test_an_adapter_of_another_model_is_refused(checkpoint, checkpoints, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", checkpoint, target_modules=["down_proj"])
    message = "is for another model: .* has 64 outputs and 128 inputs in the adapter, 96 and 192 in the model"
    with pytest.raises(ValueError, match=message):
        load(checkpoints("gqa3-untied"), lora=adapter)


def test_other_files_are_refused(adapter, checkpoint, tmp_path):
    weights = adapter / "adapter_model.safetensors"
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors; adapter_model\.bin is not read"):
        load(checkpoint, lora=adapter)
    weights.write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged"):
        load(checkpoint, lora=adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json cannot be read"):
        load(checkpoint, lora=adapter)
    with pytest.raises(ValueError, match=r"is not a LoRA adapter: it has no adapter_config\.json"):
        load(checkpoint, lora=tmp_path)
