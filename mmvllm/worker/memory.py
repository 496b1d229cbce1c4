"""How many KV blocks there are: what a stated number of bytes holds, or what the largest step leaves of a GPU."""

from dataclasses import replace

import torch
from torch import Tensor

from mmvllm.config import EngineConfig, ModelConfig
from mmvllm.kernels.common.kv_cache import DTYPE_LIMITS, KVCache, QuantizedKVCache
from mmvllm.layers.batch import Batch, prompt_batch
from mmvllm.models.interface import Model
from mmvllm.sampling.sampler import trial
from mmvllm.utils.transfer import current_device
from mmvllm.worker.decode_graphs import LARGEST
from mmvllm.worker.mixed_graphs import MAX_PREFILLS, NUM_TOKENS
from mmvllm.worker.vision_graphs import NUM_PATCHES


def kv_block_bytes(config: ModelConfig, block_size: int, kv_dtype: torch.dtype) -> int:
    """Bytes of one KV block: keys and values of `block_size` tokens in all layers, including scales."""
    return empty_kv_cache(config, 1, block_size, kv_dtype, torch.device("meta")).nbytes


def empty_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, kv_dtype: torch.dtype, device: torch.device
) -> KVCache:
    """(layers, 2, num_blocks, block_size, K, D), not initialised."""
    slots = (config.num_hidden_layers, 2, num_blocks, block_size, config.num_key_value_heads)
    values = torch.empty(*slots, config.head_dim, dtype=kv_dtype, device=device)
    return QuantizedKVCache(values, torch.empty(slots, device=device)) if kv_dtype in DTYPE_LIMITS else values


def affordable_blocks(
    budget: int, engine_config: EngineConfig, config: ModelConfig, block_size: int, kv_dtype: torch.dtype
) -> int:
    """KV blocks that `budget` bytes hold, but no more than all sequences at full length could use."""
    longest = engine_config.max_model_len or config.max_position_embeddings
    useful = engine_config.max_num_seqs * -(-longest // block_size)
    return min(max(0, budget) // kv_block_bytes(config, block_size, kv_dtype), useful)


def num_kv_blocks(
    model: Model, engine_config: EngineConfig, block_size: int, dtype: torch.dtype, device: torch.device, graphs: bool
) -> int:
    """The number that the user asked for, or all that fit; raises ValueError if not even one does."""
    if engine_config.num_kvcache_blocks:
        return engine_config.num_kvcache_blocks
    if device.type == "cpu":
        budget, source = engine_config.cpu_kvcache_bytes, "cpu_kvcache_bytes"
    else:
        budget, source = _gpu_budget(model, engine_config, block_size, dtype, device, graphs), "gpu_memory_utilization"
    kv_dtype = engine_config.resolve_kv_dtype(dtype)
    num_blocks = affordable_blocks(budget, engine_config, model.config, block_size, kv_dtype)
    if num_blocks < 1:
        block_bytes = kv_block_bytes(model.config, block_size, kv_dtype)
        raise ValueError(
            f"no room for the KV cache: a block takes {block_bytes} bytes, {budget} are left; raise {source}, "
            "or lower max_num_batched_tokens, max_vision_patches or encoder_cache_bytes"
        )
    return num_blocks


def _gpu_budget(
    model: Model, engine_config: EngineConfig, block_size: int, dtype: torch.dtype, device: torch.device, graphs: bool
) -> int:
    """Bytes of the allowed share that are left beside other processes, the largest step and the encoder cache."""
    with current_device(device):
        peak = peak_memory(model, engine_config, block_size, dtype, device)
        captured = graphs_bytes(model, engine_config, block_size, dtype, device) if graphs else 0
    torch.cuda.empty_cache()  # else the largest step's memory stays reserved, in pieces that the KV cache cannot use
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)  # what could not be freed, because the weights use parts of it
    budget = int(total * engine_config.gpu_memory_utilization) - (total - free - reserved) - max(peak, reserved)
    return budget - captured - (engine_config.encoder_cache_bytes if model.config.vision else 0)


def num_graph_logits(max_num_seqs: int) -> int:
    """Rows of logits that captured steps have at most."""
    return min(max_num_seqs, LARGEST) + MAX_PREFILLS


@torch.inference_mode()
def graphs_bytes(
    model: Model, engine_config: EngineConfig, block_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes that CUDA graphs take: twice what the largest takes beside the weights.

    Graphs share memory, but they keep it, and have inputs and outputs of their own in addition.
    """
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _encode_image(model, NUM_PATCHES[-1], dtype, device)
    cache = _full_cache(model.config, engine_config, max(NUM_TOKENS), block_size, dtype, device)
    model(*_full_step(model.config, max(NUM_TOKENS), num_graph_logits(engine_config.max_num_seqs), dtype, cache))
    torch.cuda.synchronize(device)
    return 2 * (torch.cuda.max_memory_allocated(device) - before)


@torch.inference_mode()
def peak_memory(
    model: Model, engine_config: EngineConfig, block_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes that the largest step takes on the GPU, weights included: out of memory at start rather than in service.

    One item above `max_vision_patches`, which may be encoded alone, is not reserved for.
    """
    torch.cuda.reset_peak_memory_stats(device)
    _encode_image(model, engine_config.max_vision_patches, dtype, device)
    budget, max_logits = engine_config.max_num_batched_tokens, engine_config.max_num_seqs
    cache = _full_cache(model.config, engine_config, budget, block_size, dtype, device)
    trial(model(*_full_step(model.config, budget, max_logits, dtype, cache)))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _encode_image(model: Model, num_patches: int, dtype: torch.dtype, device: torch.device) -> None:
    """Encode one image of about `num_patches` patches, if the model has a ViT."""
    vision = model.config.vision
    if vision is not None:
        side = vision.spatial_merge_size
        grid = (1, side, max(side, num_patches // side // side * side))
        model.encode(torch.zeros(grid[1] * grid[2], vision.patch_dim, dtype=dtype, device=device), [grid])


def _full_cache(
    config: ModelConfig,
    engine_config: EngineConfig,
    num_tokens: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """A KV cache for `num_tokens` tokens of one sequence."""
    kv_dtype = engine_config.resolve_kv_dtype(dtype)
    return empty_kv_cache(config, -(-num_tokens // block_size), block_size, kv_dtype, device)


def _full_step(
    config: ModelConfig, num_tokens: int, num_logits: int, dtype: torch.dtype, kv_cache: KVCache
) -> tuple[Batch, Tensor, KVCache]:
    """The model's arguments for one prompt of `num_tokens` tokens, all of images if there is a ViT."""
    device = kv_cache.device
    batch = prompt_batch(num_tokens, num_logits, kv_cache.shape[3], device)
    if config.vision is not None:
        batch = replace(batch, mm_token_indices=torch.arange(num_tokens, device=device))
    mm_embeds = torch.zeros(len(batch.mm_token_indices), config.mm_embed_size, dtype=dtype, device=device)
    return batch, mm_embeds, kv_cache
