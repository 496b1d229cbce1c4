"""The number of KV blocks: from bytes on a CPU, from a trial run on a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mmvllm.config import EngineConfig
from mmvllm.worker import memory
from mmvllm.worker.memory import kv_block_bytes, num_kv_blocks, peak_memory
from tests.helpers.models.shapes import every_family

GiB = 2**30


@pytest.mark.thinned(2)
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


class FakeCuda:
    """A GPU of 80 GiB, and the part of torch's allocator that counting blocks asks; sizes in bytes."""

    def __init__(self, monkeypatch, others: int, peak: int, cached: int, fragments: int = 0):
        self.others, self.peak, self.cached, self.kept = others, peak, cached, 4 * GiB + fragments
        for name in ("mem_get_info", "memory_reserved", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(memory, "peak_memory", lambda *_: peak)
        monkeypatch.setattr(memory, "current_device", lambda device: nullcontext())

    def mem_get_info(self, device) -> tuple[int, int]:
        return 80 * GiB - self.others - self.memory_reserved(device), 80 * GiB

    def memory_reserved(self, device) -> int:
        return self.kept + self.cached

    def empty_cache(self) -> None:
        self.cached = 0


@pytest.fixture
def blocks_on_a_gpu(checkpoint, make_llm, monkeypatch):
    """The GiB of KV blocks of an engine that may use half of a fake GPU of 80 GiB, and has 2 GiB for images."""
    runner = make_llm(checkpoint).engine.model_runner
    config = EngineConfig(gpu_memory_utilization=0.5, encoder_cache_bytes=2 * GiB, max_num_seqs=10**6)

    def blocks(**sizes: int) -> float:
        cuda = FakeCuda(monkeypatch, **sizes)
        device = SimpleNamespace(type="cuda")
        number = num_kv_blocks(runner.model, config, runner.block_size, runner.dtype, device, graphs=False)
        assert cuda.cached == 0, "what the trial run left must be free for the KV cache"
        return round(number * kv_block_bytes(runner.model_config, runner.block_size, runner.dtype) / GiB, 3)

    return blocks


def test_num_blocks_on_a_gpu_is_what_the_largest_step_leaves(blocks_on_a_gpu):
    """Another process uses 10 GiB; the weights take 4, and the largest step 5 together with them."""
    assert blocks_on_a_gpu(others=10 * GiB, peak=5 * GiB, cached=3 * GiB) == 40 - 10 - 5 - 2
    with pytest.raises(ValueError, match="raise gpu_memory_utilization"):
        blocks_on_a_gpu(others=40 * GiB, peak=5 * GiB, cached=0)


def test_memory_that_the_allocator_cannot_free_is_not_given_to_the_kv_cache(blocks_on_a_gpu):
    """7 GiB stay reserved around 4 GiB of weights: more than the largest step needed."""
    assert blocks_on_a_gpu(others=10 * GiB, peak=5 * GiB, cached=0, fragments=3 * GiB) == 40 - 10 - 7 - 2


def test_num_blocks_is_at_most_what_all_sequences_can_use(checkpoint, make_llm):
    engine = make_llm(checkpoint, num_kvcache_blocks=None, max_num_seqs=3, max_model_len=100).engine
    assert engine.model_runner.num_blocks == 3 * 7


@pytest.mark.thinned(4)
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
    config = EngineConfig(max_vision_patches=patches, max_num_batched_tokens=32, max_num_seqs=64)
    assert peak_memory(runner.model, config, runner.block_size, runner.dtype, runner.device) == 123
    assert seen == [max(4, patches // 4 * 4)] and steps == [((32, runner.model_config.mm_embed_size), 32)]
