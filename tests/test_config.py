"""Engine options are checked once; errors name the option, the value and the valid range."""

import dataclasses
import inspect
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmvllm import LLM
from mmvllm.config import EngineConfig

INTEGERS = ("max_num_seqs", "max_num_batched_tokens", "max_vision_patches", "kvcache_block_size")


INTEGERS += ("num_kvcache_blocks", "cpu_kvcache_bytes", "encoder_cache_bytes")


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [0, -1, 1.5, 8.0, "8", True, math.nan, [8]], ids=str)
def test_sizes_must_be_integers_of_at_least_one(name, value):
    with pytest.raises(ValueError) as error:
        EngineConfig(**{name: value})
    assert str(error.value) == f"{name} is {value!r}, must be an integer of at least 1"


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1, 4096, np.int64(7)], ids=str)
def test_sizes_are_kept(name, value):
    assert getattr(EngineConfig(**{name: value}), name) == value


def test_none_is_valid_only_for_sizes_with_a_computed_default():
    computed = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kvcache_blocks")
    assert EngineConfig(**dict.fromkeys(computed)) == EngineConfig()
    with pytest.raises(ValueError, match="max_vision_patches is None, must be an integer of at least 1"):
        EngineConfig(max_vision_patches=None)


@pytest.mark.parametrize(
    ("gib", "share", "want"),
    [(23.6, 1, (64, 4096)), (31.4, 0.9, (256, 8192)), (31.4, 0.7, (64, 4096)), (139, 0.9, (256, 8192))],
)
def test_the_limits_of_a_step_follow_the_memory_that_may_be_used(gib, share, want, monkeypatch):
    cards = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards)
    config = EngineConfig(gpu_memory_utilization=share).with_limits(torch.device("cuda:1"))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == want
    given = EngineConfig(gpu_memory_utilization=share, max_num_seqs=7).with_limits(torch.device("cuda"))
    assert (given.max_num_seqs, given.max_num_batched_tokens) == (7, want[1])
    cpu = EngineConfig().with_limits(torch.device("cpu"))
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens) == (64, 4096)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        # One token of the prompt and one of the completion.
        ("max_model_len", 1, "max_model_len is 1, must be an integer of at least 2"),
        ("seed", -1, "seed is -1, must be an integer of at least 0"),
        ("seed", None, "seed is None, must be an integer of at least 0"),
        ("seed", 0.5, "seed is 0.5, must be an integer"),
        ("gpu_memory_utilization", 0, r"gpu_memory_utilization is 0, must be a number in \(0, 1\]"),
        ("gpu_memory_utilization", 1.01, r"is 1.01, must be a number in \(0, 1\]"),
        ("gpu_memory_utilization", math.nan, r"is nan, must be a number in \(0, 1\]"),
        ("gpu_memory_utilization", "0.9", r"is '0.9', must be a number in \(0, 1\]"),
        ("gpu_memory_utilization", True, r"is True, must be a number in \(0, 1\]"),
        ("enable_prefix_caching", "no", "enable_prefix_caching is 'no', must be True or False"),
        ("enforce_eager", 1, "enforce_eager is 1, must be True or False"),
        ("async_scheduling", "yes", "async_scheduling is 'yes', must be True or False"),
        ("skip_warmup", None, "skip_warmup is None, must be True or False"),
        ("load_format", "pt", "load_format is 'pt', must be 'auto', 'safetensors' or 'dummy'"),
        ("load_format", None, "load_format is None, must be 'auto', 'safetensors' or 'dummy'"),
        (
            "attention_backend",
            "fast",
            "attention_backend is 'fast', must be 'auto', 'flash', 'flash4', 'triton' or 'torch'",
        ),
        ("lora", "", "lora is '', must be the folder of an adapter"),
        ("max_loras", 0, "max_loras is 0, must be an integer of at least 1"),
        ("quantization", "int2", "quantization is 'int2', must be None, 'int8', 'int4' or 'fp8'"),
    ],
    ids=str,
)
def test_an_invalid_value_is_refused_with_value_and_range(name, value, match):
    with pytest.raises(ValueError, match=match):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("value", [1, 1.0, 0.05, np.float32(0.5)], ids=str)
def test_gpu_memory_utilization_is_kept(value):
    assert EngineConfig(gpu_memory_utilization=value).gpu_memory_utilization == value


@pytest.mark.parametrize("device", ["gpu", "tpu:0", "mps", "meta", "", None, 1.5, True, "cuda:-1"], ids=str)
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ValueError) as error:
        EngineConfig(device=device).resolve_device()
    assert str(error.value) == f"device is {device!r}, must be 'auto', 'cpu', 'cuda' or 'cuda:N'"


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")], ids=str)
def test_cuda_is_refused_without_cuda_devices(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"device is .*cuda.*, but this torch \(.*\) sees no CUDA devices"):
        EngineConfig(device=device).resolve_device()


@pytest.mark.parametrize(("number", "found"), [(1, "1 CUDA device"), (2, "2 CUDA devices")])
def test_a_cuda_index_beyond_the_last_is_refused(number, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    last = f"cuda:{number - 1}"
    assert EngineConfig(device=last).resolve_device() == torch.device(last)
    with pytest.raises(ValueError, match=rf"device is 'cuda:{number}', but this torch .* sees {found}$"):
        EngineConfig(device=f"cuda:{number}").resolve_device()


@pytest.mark.parametrize(
    ("given", "checkpoint_dtype", "device", "want"),
    [
        ("auto", torch.float16, "cpu", torch.float32),
        ("auto", torch.bfloat16, "cpu", torch.bfloat16),
        ("auto", torch.float32, "cpu", torch.float32),
        ("auto", torch.float16, "cuda", torch.float16),
        ("auto", torch.bfloat16, "cuda", torch.bfloat16),
        ("float16", torch.float32, "cpu", torch.float16),
        ("float32", torch.bfloat16, "cuda", torch.float32),
        (torch.bfloat16, torch.float32, "cpu", torch.bfloat16),
    ],
    ids=str,
)
def test_dtype_is_the_given_one_or_that_of_the_checkpoint(given, checkpoint_dtype, device, want):
    assert EngineConfig(dtype=given).resolve_dtype(checkpoint_dtype, torch.device(device)) == want


@pytest.mark.parametrize("dtype", ["double", "float64", "bf16", "", None, torch.float64, torch.int8, 16], ids=str)
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(ValueError) as error:
        EngineConfig(dtype=dtype).resolve_dtype(torch.float32, torch.device("cpu"))
    assert str(error.value) == f"dtype is {dtype!r}, must be 'auto', 'float32', 'float16' or 'bfloat16'"


@pytest.mark.parametrize("name", ["device", "dtype", "load_format", "max_num_seqs"])
def test_llm_refuses_an_invalid_value(name, checkpoint):
    with pytest.raises(ValueError, match=f"{name} is 'nonsense', must be"):
        LLM(checkpoint, **{name: "nonsense"})


def test_every_field_is_documented():
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(EngineConfig), re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(EngineConfig)]


def test_llm_refuses_an_unknown_argument_with_a_hint(checkpoint):
    with pytest.raises(TypeError, match="LLM has no argument 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(checkpoint, max_num_seq=4)
    with pytest.raises(TypeError, match="LLM has no argument 'zzz'; known: device, tensor_parallel_size, dtype"):
        LLM(checkpoint, zzz=4)
