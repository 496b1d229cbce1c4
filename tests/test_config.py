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
    assert str(error.value) == f"{name} must be an integer of at least 1, got {value!r}"


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1, 4096, np.int64(7)], ids=str)
def test_sizes_are_kept(name, value):
    assert getattr(EngineConfig(**{name: value}), name) == value


def test_none_is_valid_only_for_sizes_with_a_computed_default():
    computed = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kvcache_blocks")
    assert EngineConfig(**dict.fromkeys(computed)) == EngineConfig()
    with pytest.raises(ValueError, match="max_vision_patches must be an integer of at least 1, got None"):
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
        ("max_model_len", 1, "max_model_len must be an integer of at least 2, got 1"),
        ("seed", -1, "seed must be an integer of at least 0, got -1"),
        ("seed", None, "seed must be an integer of at least 0, got None"),
        ("seed", 0.5, "seed must be an integer.*, got 0.5"),
        ("gpu_memory_utilization", 0, r"gpu_memory_utilization must be a number in \(0, 1\], got 0"),
        ("gpu_memory_utilization", 1.01, r"must be a number in \(0, 1\], got 1.01"),
        ("gpu_memory_utilization", math.nan, r"must be a number in \(0, 1\], got nan"),
        ("gpu_memory_utilization", "0.9", r"must be a number in \(0, 1\], got '0.9'"),
        ("gpu_memory_utilization", True, r"must be a number in \(0, 1\], got True"),
        ("enable_prefix_caching", "no", "enable_prefix_caching must be True or False, got 'no'"),
        ("enforce_eager", 1, "enforce_eager must be True or False, got 1"),
        ("async_scheduling", "yes", "async_scheduling must be True or False, got 'yes'"),
        ("skip_warmup", None, "skip_warmup must be True or False, got None"),
        ("load_format", "pt", "load_format must be 'auto', 'safetensors' or 'dummy', got 'pt'"),
        ("load_format", None, "load_format must be 'auto', 'safetensors' or 'dummy', got None"),
        (
            "attention_backend",
            "fast",
            "attention_backend must be 'auto', 'flash', 'flash4', 'triton' or 'torch', got 'fast'",
        ),
        ("lora", "", "lora must be the folder of an adapter, got ''"),
        ("max_loras", 0, "max_loras must be an integer of at least 1, got 0"),
        ("quantization", "int2", "quantization must be None, 'int8', 'int4' or 'fp8', got 'int2'"),
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
    assert str(error.value) == f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}"


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
    assert str(error.value) == f"dtype must be 'auto', 'float32', 'float16' or 'bfloat16', got {dtype!r}"


@pytest.mark.parametrize("name", ["device", "dtype", "load_format", "max_num_seqs"])
def test_llm_refuses_an_invalid_value(name, checkpoint):
    with pytest.raises(ValueError, match=f"{name} must be .*, got 'nonsense'"):
        LLM(checkpoint, **{name: "nonsense"})


def test_every_field_is_documented():
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(EngineConfig), re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(EngineConfig)]


def test_llm_refuses_an_unknown_argument_with_a_hint(checkpoint):
    with pytest.raises(TypeError, match="LLM has no argument 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(checkpoint, max_num_seq=4)
    with pytest.raises(TypeError, match="LLM has no argument 'zzz'; known: device, tensor_parallel_size, dtype"):
        LLM(checkpoint, zzz=4)
