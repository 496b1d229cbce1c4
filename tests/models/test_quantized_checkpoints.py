"""Checkpoints in the published formats, of every family, are read to the values that they stand for."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mmvllm.models.coded_layouts import QuantizedTensor
from mmvllm.models.quantized_tensors import assembled
from mmvllm.models.registry import load_config
from tests.helpers.quantized_checkpoints import FORMATS, LINEAR, quantized_checkpoint
from tests.helpers.shapes import RICHEST


@pytest.mark.parametrize("shape", [*RICHEST, "qwen2-gqa3-untied", "deepstack1-vit72-untied"])
@pytest.mark.parametrize("method", FORMATS)
def test_every_tensor_is_read_to_its_values(method, shape, checkpoints, tmp_path):
    saved = quantized_checkpoint(checkpoints(shape), tmp_path, method)
    config, want = load_config(saved.quantized), load_file(saved.dequantized / "model.safetensors")
    num_experts = config.experts.num_experts if config.experts else 0
    with safe_open(saved.quantized / "model.safetensors", framework="pt") as file:
        stored = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 - not a dict
        got = dict(assembled(stored, config.quantization, num_experts))
        assert got.keys() == want.keys()
        for name, tensor in got.items():
            assert tensor.get_shape() == list(want[name].shape)
            is_coded = isinstance(tensor, QuantizedTensor)
            assert is_coded == bool(LINEAR.fullmatch(name))
            values = tensor.weight.dequantized() if is_coded else tensor[(slice(None),) * want[name].dim()]
            assert torch.equal(values, want[name]), name
            layer = name.removesuffix(".weight")
            assert (config.quantization.scheme_of(layer) is not None) or not is_coded
