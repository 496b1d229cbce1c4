"""Checkpoints of every supported layout load into the same model; other checkpoints are refused by name."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models.weights import assert_same, load, state


def renamed(**prefixes: str):
    """Rename tensors by the first prefix that fits; `__` means a dot."""
    prefixes = {old.replace("__", "."): new for old, new in prefixes.items()}

    def rename(tensors: dict) -> dict:
        made = {}
        for name, tensor in tensors.items():
            old = next((old for old in prefixes if name.startswith(old)), "")
            made[prefixes.get(old, "") + name.removeprefix(old)] = tensor
        return made

    return rename


@pytest.mark.parametrize("shape", ["gqa2-tied", "gqa3-untied"])
@pytest.mark.parametrize(
    "rename",
    [
        renamed(visual__="model.visual.", model__="model.language_model."),
        renamed(model__="language_model.model.", lm_head__="language_model.lm_head."),
    ],
    ids=["transformers 5", "transformers 4.52"],
)
def test_names_of_every_layout_give_the_same_model(shape, rename, checkpoints, copy_of):
    assert "visual.patch_embed.proj.weight" in load_file(checkpoints(shape) / "model.safetensors")
    assert_same(state(copy_of(shape, rename)), state(checkpoints(shape)))


@pytest.mark.parametrize("shape", ["experts8-top3", "experts16-top8-tied"])
def test_weights_of_experts_may_be_transposed(shape, checkpoints, copy_of):
    """They are published so; transformers saves them as it uses them."""

    def published(tensors: dict) -> dict:
        return {name: x.mT.contiguous() if ".experts." in name else x for name, x in tensors.items()}

    assert_same(state(copy_of(shape, published)), state(checkpoints(shape)))


def test_every_parameter_comes_from_the_checkpoint(checkpoint):
    """Each tensor of the checkpoint is found in the model by its values, not only by its name."""
    tensors, model = load_file(checkpoint / "model.safetensors"), load(checkpoint)
    parameters = dict(model.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == sum(t.numel() for t in tensors.values())
    for name in ("model.norm.weight", "visual.merger.mlp.2.bias", "model.embed_tokens.weight"):
        assert torch.equal(parameters[name.replace("model.", "decoder.")], tensors[name])
    kernel = tensors["visual.patch_embed.proj.weight"]
    assert torch.equal(parameters["visual.patch_embed.proj.weight"], kernel.flatten(1))
    prefix = "model.layers.1.self_attn."
    for kind in ("weight", "bias"):
        parts = [tensors[f"{prefix}{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(parameters[f"decoder.layers.1.self_attn.qkv_proj.{kind}"], torch.cat(parts))
    gate_up = [tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(parameters["decoder.layers.0.mlp.gate_up_proj.weight"], torch.cat(gate_up))
    assert not any(p.requires_grad for p in parameters.values()) and not model.training


def shard(folder: Path, num_shards: int, index: bool = True) -> Path:
    """Split the folder's weights into shards, with or without an index file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {tensor: names[i % num_shards] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in weight_map if weight_map[tensor] == name}, folder / name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("index", [True, False], ids=["with index", "without index"])
def test_shards_give_the_same_model(index, checkpoint, copy_of):
    assert_same(state(shard(copy_of("gqa2-tied"), 3, index)), state(checkpoint))


def test_files_that_the_index_does_not_name_are_ignored(checkpoint, copy_of):
    folder = shard(copy_of("gqa2-tied"), 2)
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "consolidated.safetensors")
    assert_same(state(folder), state(checkpoint))


def test_files_beside_model_safetensors_are_ignored(checkpoint, copy_of):
    folder = copy_of("gqa2-tied")
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "adapter.safetensors")
    assert_same(state(folder), state(checkpoint))


def test_a_missing_shard_is_named(copy_of):
    folder = shard(copy_of("gqa2-tied"), 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00003\.safetensors, which .*index\.json names"):
        load(folder)


DAMAGED_INDEXES = [
    *("{", "[]", '{"metadata": {}}', '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": null}}'),
    *('{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": {"a": ""}}', "[" * 100_000),
]


@pytest.mark.parametrize("text", DAMAGED_INDEXES, ids=lambda text: text[:40])
def test_a_damaged_index_is_named(text, copy_of):
    folder = shard(copy_of("gqa2-tied"), 2)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged: .*; download it again"):
        load(folder)


@pytest.mark.parametrize("length", [0, 4, 100, -1000], ids=["empty", "half length", "half header", "no data"])
def test_a_truncated_file_is_named(length, copy_of):
    path = copy_of("gqa2-tied") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: .*; download it again"):
        load(path.parent)


def test_a_git_lfs_pointer_is_refused(copy_of):
    path = copy_of("gqa2-tied") / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load(path.parent)


def test_tensors_that_a_tied_checkpoint_does_not_need_are_ignored(checkpoint, copy_of):
    extra = {
        "lm_head.weight": load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "visual.rotary_pos_emb.inv_freq": torch.ones(4),
    }
    assert_same(state(copy_of("gqa2-tied", lambda tensors: tensors | extra)), state(checkpoint))


@pytest.mark.parametrize("shape", ["gqa2-tied", "deepstack3-tied", "qwen2-gqa3-tied"])
def test_a_tied_head_that_differs_from_the_embedding_is_refused(shape, copy_of):
    """transformers uses such a head, whatever the config says: it must not be ignored."""

    def with_head(tensors):
        (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
        return tensors | {"lm_head.weight": embedding + 1}

    folder = copy_of(shape, with_head)
    with pytest.raises(ValueError, match=r"tensors that differ from those they are tied to \(1\): lm_head\.weight$"):
        load(folder)


def test_an_untied_checkpoint_uses_its_lm_head(checkpoints):
    assert torch.equal(
        state(checkpoints("gqa3-untied"))["lm_head.weight"],
        load_file(checkpoints("gqa3-untied") / "model.safetensors")["lm_head.weight"],
    )


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ("gqa3-untied", "lm_head.weight"),
        ("gqa2-tied", "model.embed_tokens.weight"),
        ("gqa2-tied", "model.layers.1.self_attn.k_proj.bias"),
        ("gqa2-tied", "model.layers.0.mlp.up_proj.weight"),
        ("gqa2-tied", "model.layers.0.mlp.down_proj.weight"),
        ("gqa2-tied", "visual.patch_embed.proj.weight"),
        ("gqa2-tied", "visual.blocks.2.attn.qkv.bias"),
        ("gqa2-tied", "visual.merger.mlp.0.weight"),
    ],
)
def test_a_missing_tensor_is_named_as_in_checkpoints(shape, name, copy_of):
    folder = copy_of(shape, lambda tensors: {key: tensors[key] for key in tensors if key != name})
    with pytest.raises(ValueError, match=rf"does not match its config\.json: missing tensors \(1\): {name}$"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    ["model.layers.9.mlp.up_proj.weight", "model.norm.bias", "visual.blocks.0.attn.q_proj.weight", "score.weight", "x"],
)
def test_an_extra_tensor_is_named(name, copy_of):
    folder = copy_of("gqa2-tied", lambda tensors: tensors | {name: torch.ones(64)})
    with pytest.raises(ValueError, match=rf"tensors that belong to no parameter or come twice \(1\): {name}$"):
        load(folder)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", ["int8", "bool", "int16", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "visual.blocks.0.attn.qkv.weight"])
def test_a_tensor_that_is_not_of_floats_is_named(name, dtype, copy_of):
    """A quantized checkpoint that has lost its config was loaded as if its codes were weights."""
    folder = copy_of("gqa2-tied", lambda tensors: tensors | {name: tensors[name].to(getattr(torch, dtype))})
    with pytest.raises(ValueError, match=rf"without its quantization_config \(1\): {re.escape(name)} is {dtype}$"):
        load(folder)


def test_float64_is_read(copy_of, checkpoints):
    folder = copy_of("gqa2-tied", lambda tensors: {name: one.double() for name, one in tensors.items()})
    assert_same(state(folder), state(checkpoints("gqa2-tied")))


def test_a_tensor_of_4_bit_floats_is_named(copy_of):
    floats = torch.ones(64, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    folder = copy_of("gqa2-tied", lambda tensors: tensors | {"model.norm.weight": floats})
    with pytest.raises(ValueError, match=r"model\.norm\.weight has floats of 4 or 6 bits \(F4\), which are not sup"):
        load(folder)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_a_tensor_of_6_bit_floats_is_named(dtype, copy_of):
    folder = copy_of("gqa2-tied", lambda tensors: tensors)
    header = {"model.norm.weight": {"dtype": dtype, "shape": [4, 4], "data_offsets": [0, 12]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with pytest.raises(ValueError, match=rf"model\.norm\.weight has floats of 4 or 6 bits \({dtype}\)"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight", "visual.patch_embed.proj.weight"]
)
def test_a_tensor_with_values_that_are_not_finite_is_named(name, value, copy_of):
    def spoilt(tensors):
        tensors[name].view(-1)[7] = value
        return tensors

    with pytest.raises(ValueError, match=rf"NaN, infinite, or too large for the dtype \(1\): {re.escape(name)}$"):
        load(copy_of("gqa2-tied", spoilt))


def test_a_tensor_with_values_that_the_dtype_does_not_have_is_named(copy_of):
    folder = copy_of("gqa2-tied", lambda tensors: tensors | {"model.norm.weight": torch.full((64,), 1e5)})
    load(folder, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"too large for the dtype \(1\): model\.norm\.weight$"):
        load(folder, dtype=torch.float16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"text_config": {"vocab_size": 3 * 10**9}},
            r"model\.embed_tokens\.weight is .*, needs \(3000000000, 64\)",
        ),
        ({"text_config": {"vocab_size": 2**62}}, r"config\.json has sizes that no model has: RuntimeError: .*overflow"),
        ({"text_config": {"vocab_size": 10**30}}, r"config\.json"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers must be at most 1024, got 1000000000"),
        (
            {"vision_config": {"mlp_ratio": 10**9}},
            r"config\.json says that .*mlp\.fc2 has .* values, more than the files of weights can have",
        ),
        ({"vision_config": {"mlp_ratio": 10**5}}, r"config\.json says that .*mlp\.fc2 has .* values, more than"),
        ({"vision_config": {"depth": 10**9}}, "vision_config's depth must be at most 1024, got 1000000000"),
    ],
)
def test_sizes_that_the_tensors_contradict_take_no_memory(changes, message, copy_of):
    folder = copy_of("gqa2-tied")
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        config[name] |= value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_tensor_under_two_names_is_named(copy_of):
    folder = copy_of("gqa2-tied", lambda tensors: tensors | {"model.language_model.norm.weight": torch.ones(64)})
    with pytest.raises(ValueError, match=r"belong to no parameter or come twice \(1\): model\.norm\.weight$"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("model.norm.weight", (63,), (64,)),
        ("model.layers.0.self_attn.v_proj.weight", (64, 32), (32, 64)),
        ("model.layers.0.mlp.gate_proj.weight", (256, 64), (128, 64)),
        ("visual.patch_embed.proj.weight", (48, 3, 2, 14, 7), (48, 1176)),
        ("model.embed_tokens.weight", (768, 64, 1), (768, 64)),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(name, shape, needed, copy_of):
    folder = copy_of("gqa2-tied", lambda tensors: tensors | {name: torch.ones(shape)})
    with pytest.raises(ValueError) as error:
        load(folder)
    assert str(error.value).endswith(f"tensors of the wrong shape (1): {name} is {shape}, needs {needed}")


def test_all_problems_are_listed_with_some_of_the_names(copy_of):
    rename = renamed(model__layers__1="model.layers.7", visual__blocks__0__attn__qkv="visual.blocks.0.attn.Wqkv")
    match = r"missing tensors \(14\): .* and 9 others; tensors that belong to no .* \(14\): .* and 9 others$"
    with pytest.raises(ValueError, match=match) as error:
        load(copy_of("gqa2-tied", rename))
    assert len(re.findall(r"\.weight|\.bias", str(error.value))) == 10


def test_missing_vision_weights_are_a_mismatch(copy_of):
    folder = copy_of("gqa2-tied", lambda tensors: {k: v for k, v in tensors.items() if not k.startswith("visual.")})
    with pytest.raises(ValueError, match=r"missing tensors \(\d+\): visual\.patch_embed\.proj\.weight, "):
        load(folder)
