"""Checkpoint folders in every form that is served give the same model; the others are refused by name."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from mmvllm import LLM, SamplingParams
from mmvllm.models.registry import load_config
from mmvllm.models.weights import BUNDLED, load_model, resolve_folder
from tests.helpers.requests import ask, noise_image

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
CPU = torch.device("cpu")
PROMPTS = [[5, 9, 200, 31], [700], list(range(40, 77))]


def load(folder: Path, dtype: torch.dtype = torch.float32, **options) -> torch.nn.Module:
    return load_model(folder, load_config(folder), CPU, dtype, **options)


def state(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder).state_dict()


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.fixture
def copy_of(checkpoints, tmp_path):
    """A folder like a checkpoint, but with the tensors and config values that the given functions make of its own."""

    def copy(shape: str, tensors=lambda tensors: tensors, config=lambda config: config) -> Path:
        source, folder = checkpoints(shape), tmp_path / "copy"
        shutil.copytree(source, folder)
        save_file(tensors(load_file(source / "model.safetensors")), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config(json.loads((source / "config.json").read_text()))))
        return folder

    return copy


def renamed(**prefixes: str):
    """Rename tensors by the first prefix that fits; `__` stands for a dot."""
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


def test_every_parameter_comes_from_the_checkpoint(checkpoint):
    """The values, not only the names: each checkpoint tensor is found again in the model."""
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
    """Split the folder's weights into shards, with or without the index that says so."""
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


def test_files_that_the_index_does_not_name_are_left_alone(checkpoint, copy_of):
    folder = shard(copy_of("gqa2-tied"), 2)
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "consolidated.safetensors")
    assert_same(state(folder), state(checkpoint))


def test_files_beside_model_safetensors_are_left_alone(checkpoint, copy_of):
    folder = copy_of("gqa2-tied")
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "adapter.safetensors")
    assert_same(state(folder), state(checkpoint))


def test_a_missing_shard_is_named(copy_of):
    folder = shard(copy_of("gqa2-tied"), 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00003\.safetensors, which .*index\.json names"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', '{"weight_map": 3}'])
def test_a_damaged_index_is_named(text, copy_of):
    folder = shard(copy_of("gqa2-tied"), 2)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged: .*; download it again"):
        load(folder)


@pytest.mark.parametrize("length", [0, 4, 100, -1000], ids=["empty", "half a length", "half a header", "short of data"])
def test_a_truncated_file_is_named(length, copy_of):
    path = copy_of("gqa2-tied") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: .*; download it again"):
        load(path.parent)


def test_a_git_lfs_pointer_is_no_checkpoint(copy_of):
    path = copy_of("gqa2-tied") / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load(path.parent)


def test_what_a_tied_checkpoint_does_not_need_is_ignored(checkpoint, copy_of):
    extra = {
        "lm_head.weight": torch.full((768, 64), 7.0),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "visual.rotary_pos_emb.inv_freq": torch.ones(4),
    }
    assert_same(state(copy_of("gqa2-tied", lambda tensors: tensors | extra)), state(checkpoint))


def test_an_untied_checkpoint_uses_its_head(checkpoints):
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
def test_a_missing_tensor_is_called_what_checkpoints_call_it(shape, name, copy_of):
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


def test_a_tensor_that_comes_under_two_names_is_named(copy_of):
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


def test_all_problems_are_told_at_once_but_not_all_names(copy_of):
    rename = renamed(model__layers__1="model.layers.7", visual__blocks__0__attn__qkv="visual.blocks.0.attn.Wqkv")
    match = r"missing tensors \(14\): .*, \.\.\.; tensors that belong to no .* \(14\): .*, \.\.\.$"
    with pytest.raises(ValueError, match=match) as error:
        load(copy_of("gqa2-tied", rename))
    assert len(re.findall(r"\.weight|\.bias", str(error.value))) == 10


def test_a_vision_config_that_the_weights_lack_is_a_mismatch(copy_of):
    folder = copy_of("gqa2-tied", lambda tensors: {k: v for k, v in tensors.items() if not k.startswith("visual.")})
    with pytest.raises(ValueError, match=r"missing tensors \(\d+\): visual\.patch_embed\.proj\.weight, "):
        load(folder)


class Trap:
    """Unpickling one writes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_weights_are_refused_and_not_unpickled(copy_of, tmp_path):
    folder = copy_of("gqa2-tied")
    (folder / "model.safetensors").unlink()
    sprung = tmp_path / "sprung"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(
        ValueError, match=r"no \*\.safetensors weights \(found: .*pytorch_model\.bin.*\); mmvllm loads no"
    ):
        LLM(folder)
    assert not sprung.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert sprung.exists()  # the trap works


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"not a checkpoint folder, it has no config\.json"):
        LLM(tmp_path)


def test_no_model_is_the_bundled_one_and_a_folder_is_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert resolve_folder(None) == BUNDLED
    assert resolve_folder(tmp_path) == resolve_folder(str(tmp_path)) == tmp_path
    assert resolve_folder("~/mine") == tmp_path / "mine"


@pytest.mark.parametrize("model", ["/no/such/folder", "./absent", "../absent/model", "a b/c", "a/b/c", "x" * 100])
def test_what_is_neither_folder_nor_hub_id_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        LLM(model)
    assert str(error.value) == f"model {model!r} is neither a local folder nor a hub id like 'Qwen/Qwen2-VL-2B'"


@pytest.mark.parametrize("model", ["~nobody-here/model", "x" * 300], ids=["unknown home", "name too long"])
def test_a_name_that_no_folder_can_have_is_refused(model):
    with pytest.raises(
        ValueError, match=f"model '{model}' is not a local folder and cannot be downloaded from the hub: "
    ):
        LLM(model)


def test_an_empty_name_is_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"not a checkpoint folder, it has no config\.json"):
        LLM("")


def test_a_weight_file_is_no_model(checkpoint):
    with pytest.raises(ValueError, match=r"is neither a local folder nor a hub id like 'Qwen/Qwen2-VL-2B"):
        LLM(checkpoint / "model.safetensors")


def test_hub_ids_offline(checkpoint, tmp_path):
    """A cached one is its snapshot folder, another a clear error; the mode is read when the library is imported."""
    snapshot = tmp_path / "models--tiny--cached" / "snapshots" / "0123456789"
    shutil.copytree(checkpoint, snapshot)
    (tmp_path / "models--tiny--cached" / "refs").mkdir()
    (tmp_path / "models--tiny--cached" / "refs" / "main").write_text("0123456789")
    code = """
from mmvllm.models.weights import resolve_folder
print(resolve_folder("tiny/cached"))
try:
    resolve_folder("tiny/not-cached")
except ValueError as error:
    print(error)
"""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, rest = done.stdout.split("\n", 1)
    assert Path(first) == snapshot
    assert rest.startswith("model 'tiny/not-cached' is not a local folder and cannot be downloaded from the hub: ")
    assert "offline" in rest.lower()


@pytest.fixture
def bare(checkpoint, tmp_path) -> Path:
    """Only config and tokenizer."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, folder)
    return folder


def test_dummy_weights_need_only_config_and_tokenizer(bare, make_llm):
    options = {"load_format": "dummy", "seed": 3}
    first, second = (make_llm(bare, **options) for _ in range(2))
    request = ask(noise_image(70, 60), "What?")
    outputs = [llm.generate_multimodal([request], GREEDY)[0].token_ids for llm in (first, second)]
    assert outputs[0] == outputs[1] and len(outputs[0]) == 32
    with pytest.raises(ValueError, match=r"no \*\.safetensors weights .* pass load_format='dummy'"):
        make_llm(bare)


def test_dummy_weights_are_the_seeds(bare):
    def weights(seed: int) -> dict[str, torch.Tensor]:
        return load(bare, load_format="dummy", seed=seed).state_dict()

    assert_same(weights(5), weights(5))
    one, other = weights(5), weights(6)
    assert not torch.equal(one["decoder.embed_tokens.weight"], other["decoder.embed_tokens.weight"])
    assert all(tensor.isfinite().all() for tensor in one.values())
    weights(2**64 + 5)


def test_quantized_weights_are_refused_but_dummy_ones_are_not(copy_of):
    folder = copy_of("gqa2-tied", config=lambda c: c | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    with pytest.raises(ValueError, match="is awq-quantized, which is not supported; use the original weights"):
        load(folder)
    load(folder, load_format="dummy")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_become_float32_exactly(dtype, copy_of):
    folder = copy_of("gqa2-tied", lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    tensors, got = load_file(folder / "model.safetensors"), state(folder)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert {tensor.dtype for tensor in got.values()} == {torch.float32}
    assert torch.equal(got["decoder.embed_tokens.weight"], tensors["model.embed_tokens.weight"].float())
    qkv = [tensors[f"model.layers.0.self_attn.{name}_proj.weight"].float() for name in "qkv"]
    assert torch.equal(got["decoder.layers.0.self_attn.qkv_proj.weight"], torch.cat(qkv))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_on_a_cpu(dtype, checkpoint, make_llm):
    llm = make_llm(checkpoint, dtype=dtype)
    assert {p.dtype for p in llm.engine.model_runner.model.parameters()} == {getattr(torch, dtype)}
    request = ask(noise_image(91, 64), "Describe this image.")
    (output,) = llm.generate_multimodal([request], SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1))
    assert len(output.token_ids) == 4 and all(logprob <= 0 for step in output.logprobs for logprob in step.values())


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def text_only(request, tmp_path_factory):
    """A text-only checkpoint as transformers saves it, and transformers' own model of it."""
    torch.manual_seed(11)
    config = Qwen2Config(
        vocab_size=768,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=request.param,
        eos_token_id=504,
    )
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("text-only")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    return folder, model


def test_text_only_checkpoint_gives_transformers_tokens(text_only, make_llm):
    folder, model = text_only
    outputs = make_llm(folder).generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert output.token_ids == want[0, len(prompt) :].tolist()
        assert len(set(output.token_ids)) > 4  # not one token repeated


def test_text_only_checkpoint_answers_chats_and_refuses_pictures(text_only, make_llm):
    llm = make_llm(text_only[0], skip_warmup=False)
    (answer,) = llm.generate_multimodal([ask("Hello")], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(answer.token_ids) == 3
    with pytest.raises(ValueError, match="request 0: this checkpoint is text-only, it cannot take images"):
        llm.generate_multimodal([ask(noise_image(64, 64), "What?")])
    refused, fine = llm.generate_multimodal(
        [ask(noise_image(64, 64), "What?"), ask("Hello")],
        SamplingParams(max_tokens=3, ignore_eos=True),
        on_error="return",
    )
    assert "text-only" in refused.error and fine.token_ids == answer.token_ids
