"""Small checkpoints in the formats in which quantized ones are published, and their dequantized values."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.models.packers import PackedLayer, pack_awq, pack_compressed, pack_fp8, pack_gptq, pack_int8

LINEAR = re.compile(r"(?!.*visual).*layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
FP8_BLOCK = (16, 16)


class Format(NamedTuple):
    """A packer of a layer, given the group size, and `quantization_config` for it."""

    pack: Callable[[Tensor, int], PackedLayer]
    config: Callable[[int], dict]
    fuses_experts: bool = False


class Saved(NamedTuple):
    quantized: Path
    dequantized: Path  # a plain checkpoint with the same values


def awq_config(group_size: int) -> dict:
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "modules_to_not_convert": ["visual"],
    }


def gptq_config(bits: int, group_size: int) -> dict:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": bits == 4, "desc_act": False}


def fp8_config(group_size: int) -> dict:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return config | {"weight_block_size": list(FP8_BLOCK), "modules_to_not_convert": ["lm_head", "model.visual"]}


def compressed_config(layout: str, group_size: int, activations: dict | None = None, **weights) -> dict:
    weights = {"strategy": "group", "group_size": group_size, "type": "int"} | weights
    if weights["strategy"] != "group":
        weights["group_size"] = None
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "ignore": ["lm_head", "re:.*visual.*"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations},
        },
        "kv_cache_scheme": None,
    }


def _gptq(weight: Tensor, group_size: int, bits: int) -> PackedLayer:
    return pack_gptq(weight, bits, group_size, symmetric=bits == 4)


def _packed(weight: Tensor, group_size: int, symmetric: bool) -> PackedLayer:
    return pack_compressed(weight, 4, group_size, symmetric)


def _int8(weight: Tensor, group_size: int) -> PackedLayer:
    return pack_int8(weight)


def _blocks(weight: Tensor, group_size: int) -> PackedLayer:
    return pack_fp8(weight, FP8_BLOCK)


def _rows(weight: Tensor, group_size: int) -> PackedLayer:
    return pack_fp8(weight, (1, weight.shape[1]), "weight_scale")


TOKENS = {"strategy": "token", "dynamic": True, "num_bits": 8}
FORMATS = {
    "awq": Format(pack_awq, awq_config),
    "gptq-int4": Format(partial(_gptq, bits=4), partial(gptq_config, 4)),
    "gptq-int8": Format(partial(_gptq, bits=8), partial(gptq_config, 8)),
    "fp8": Format(_blocks, fp8_config, fuses_experts=True),
    "w4a16": Format(
        partial(_packed, symmetric=True), partial(compressed_config, "pack-quantized", num_bits=4, symmetric=True)
    ),
    "w4a16-zeros": Format(
        partial(_packed, symmetric=False), partial(compressed_config, "pack-quantized", num_bits=4, symmetric=False)
    ),
    "w8a8": Format(
        _int8, partial(compressed_config, "int-quantized", activations=TOKENS, num_bits=8, strategy="channel")
    ),
    "fp8-dynamic": Format(
        _rows,
        partial(compressed_config, "float-quantized", activations=TOKENS, num_bits=8, type="float", strategy="channel"),
    ),
}


def quantized_checkpoint(plain: Path, to: Path, method: str) -> Saved:
    """Write a plain checkpoint to folders of `to`, with the decoder's linear layers in the published format `method`.

    Groups are as large as the layers allow. Experts are fused in FP8, as Qwen publishes them; otherwise each has its
    own layers, as tools save them.
    """
    tensors, form = load_file(plain / "model.safetensors"), FORMATS[method]
    size = group_size(tensors)
    quantized, dequantized = {}, {}
    for name, tensor in tensors.items():
        own, values = _stored(name, tensor, form, size)
        quantized |= own
        dequantized[name] = values
    saved = Saved(to / f"{method}-quantized", to / f"{method}-dequantized")
    for folder, contents in zip(saved, (quantized, dequantized), strict=True):
        shutil.copytree(plain, folder, dirs_exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in contents.items()}, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": form.config(size)}
    (saved.quantized / "config.json").write_text(json.dumps(config))
    return saved


def group_size(tensors: dict[str, Tensor]) -> int:
    """The largest power of 2, at most 128, that divides the inputs of all layers that are quantized."""
    columns = [
        tensor.shape[-1] for name, tensor in tensors.items() if LINEAR.fullmatch(name) or EXPERTS.fullmatch(name)
    ]
    return max(size for size in (8, 16, 32, 64, 128) if all(number % size == 0 for number in columns))


def _stored(name: str, tensor: Tensor, form: Format, size: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a plain one in the format, and their dequantized values."""
    if EXPERTS.fullmatch(name):
        return _experts(name, tensor, form, size)
    if not LINEAR.fullmatch(name):
        return {name: tensor}, tensor
    packed = form.pack(tensor, size)
    return {f"{name.removesuffix('.weight')}.{part}": own for part, own in packed.tensors.items()}, packed.values


def _experts(name: str, tensor: Tensor, form: Format, size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Pack the experts (E, out, in)."""
    if form.fuses_experts:
        packed = [form.pack(weight, size) for weight in tensor]
        qweight, scales = (
            torch.stack([one.tensors[part] for one in packed]) for part in ("weight", "weight_scale_inv")
        )
        return {name: qweight, f"{name}_scale_inv": scales}, torch.stack([one.values for one in packed])
    tensors, values = {}, []
    for i, weight in enumerate(tensor):
        layers = dict(_expert_layers(name, i, weight))
        packed = {layer: form.pack(part, size) for layer, part in layers.items()}
        tensors |= {f"{layer}.{part}": own for layer, one in packed.items() for part, own in one.tensors.items()}
        values.append(torch.cat([one.values for one in packed.values()]))
    return tensors, torch.stack(values)


def _expert_layers(name: str, number: int, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names of an expert's layers with their parts of its weight (out, in)."""
    prefix, kind = EXPERTS.fullmatch(name).groups()
    kinds = kind.split("_")
    for own, part in zip(kinds, weight.chunk(len(kinds)), strict=True):
        yield f"{prefix}.{number}.{own}_proj", part
