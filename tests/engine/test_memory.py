"""The number of KV blocks: from bytes on a CPU, from a trial run on a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mmvllm.config import EngineConfig
from mmvllm.engine import memory
from mmvllm.engine.memory import kv_block_bytes, num_kv_blocks, peak_memory
from tests.helpers.shapes import every_family

GiB = 2**30


@every_family
def test_num_blocks_on_a_cpu_follows_cpu_kvcache_bytes(checkpoint, make_llm):
    engine = make_llm(checkpoint, num_kvcache_blocks=None, cpu_kvcache_bytes=1_000_000).engine
    config = engine.model_config
    block_bytes = 2 * config.num_hidden_layers * 16 * config.num_key_value_heads * config.head_dim * 4
    assert kv_block_bytes(config, 16, torch.float32) == block_bytes
    assert engine.model_runner.num_blocks == 1_000_000 // block_bytes
    assert engine.model_runner.kv_cache.nbytes <= 1_000_000
    with pytest.raises(ValueError, match=r"no room for the KV cache: a block takes .* raise cpu_kvcache_bytes"):
        make_llm(checkpoint, num_kvcache_blocks=None, cpu_kvcache_bytes=100)


def test_num_blocks_on_a_gpu_is_what_the_largest_step_leaves(checkpoint, make_llm, monkeypatch):
    """The arithmetic for a GPU of 80 GiB of which another process uses 10."""
    runner = make_llm(checkpoint).engine.model_runner
    config = EngineConfig(gpu_memory_utilization=0.5, encoder_cache_bytes=2 * GiB, max_num_seqs=10**6)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * GiB, 80 * GiB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * GiB)
    monkeypatch.setattr(memory, "peak_memory", lambda *_: 5 * GiB)
    monkeypatch.setattr(memory, "current_device", lambda device: nullcontext())

    def num_blocks() -> int:
        cuda = SimpleNamespace(type="cuda")
        return num_kv_blocks(runner.model, config, runner.block_size, runner.dtype, cuda, graphs=False)

    block_bytes = kv_block_bytes(runner.model_config, runner.block_size, runner.dtype)
    assert num_blocks() == (40 - 10 - 5 - 2) * GiB // block_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GiB, 80 * GiB))
    with pytest.raises(ValueError, match="raise gpu_memory_utilization"):
        num_blocks()


def test_num_blocks_is_at_most_what_all_sequences_can_use(checkpoint, make_llm):
    engine = make_llm(checkpoint, num_kvcache_blocks=None, max_num_seqs=3, max_model_len=100).engine
    assert engine.model_runner.num_blocks == 3 * 7


@every_family
@pytest.mark.parametrize("patches", [1, 5, 64])
def test_the_trial_run_computes_the_largest_step(patches, checkpoint, make_llm, monkeypatch):
    runner = make_llm(checkpoint).engine.model_runner
    seen = []
    runner.model.visual.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    steps = []
    runner.model.register_forward_hook(lambda module, args, output: steps.append((args[1].shape, len(output))))
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    config = EngineConfig(max_vision_patches=patches, max_num_batched_tokens=32)
    assert peak_memory(runner.model, config, runner.block_size, runner.dtype, runner.device) == 123
    assert seen == [max(4, patches // 4 * 4)] and steps == [((32, runner.model_config.row_size), 32)]
