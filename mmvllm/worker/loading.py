"""From a checkpoint to a model on its device, with a KV cache."""

import logging

import torch

from mmvllm.config import EngineConfig, ModelConfig
from mmvllm.layers.attention import AttentionBackend
from mmvllm.layers.attention_choice import choose_attention, choose_vision_attention, warm_up_attention
from mmvllm.lora.device_adapters import DeviceAdapters
from mmvllm.models.interface import Model
from mmvllm.models.quant_methods import check_quantization, choose_linear_methods, keep_quantized
from mmvllm.models.weights import load_model
from mmvllm.processes.ranks import Ranks
from mmvllm.utils.transfer import current_device
from mmvllm.worker.checkpoint import Checkpoint
from mmvllm.worker.memory import num_kv_blocks
from mmvllm.worker.model_runner import ModelRunner
from mmvllm.worker.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


def load_runner(
    checkpoint: Checkpoint, device: torch.device, ranks: Ranks, worker_group: WorkerGroup | None = None
) -> ModelRunner:
    """Load what this rank has of the weights, and allocate its KV cache; all ranks do so at the same time.

    Raises ValueError for what cannot be served.
    """
    config, model_config, dtype = checkpoint.config, checkpoint.model_config, checkpoint.dtype
    check_quantization(config.quantization, device, dtype, model_config.quantization)
    if config.quantization == "fp8" and device.type == "cpu":
        logger.warning("quantization='fp8' is slow on a CPU: only a reference for GPUs; 'int8' is fast")
    attention, vision_attention = _attention(config, model_config, device, dtype)
    adapters: DeviceAdapters | None = None

    def prepare(model: Model) -> None:
        """Before the weights are loaded, because adapter slots exclude some linear methods."""
        nonlocal adapters
        choose_linear_methods(model, device, dtype, config.quantization)
        if model_config.quantization is not None and config.quantization is None and config.load_format != "dummy":
            keep_quantized(model, device, dtype)
        adapters = _adapters(config, model, dtype, device)

    model = load_model(
        *(checkpoint.folder, model_config, device, dtype, config.load_format, config.seed, attention, vision_attention),
        ranks=ranks,
        lora=config.lora,
        prepare=prepare,
    )
    block_size = config.kvcache_block_size or attention.block_size
    use_graphs = _uses_graphs(config, device, attention)
    num_blocks = ranks.least(num_kv_blocks(model, config, block_size, dtype, device, use_graphs))
    max_model_len = _max_model_len(config, model_config, num_blocks, block_size)
    runner = ModelRunner(
        model,
        checkpoint.image_config,
        checkpoint.video_config,
        device,
        dtype,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        attention=attention,
        use_graphs=use_graphs,
        ranks=ranks,
        worker_group=worker_group,
        adapters=adapters,
        kv_dtype=config.resolve_kv_dtype(dtype),
    )
    if device.type == "cuda" and not config.skip_warmup:
        with current_device(device), torch.inference_mode():
            warm_up_attention(attention, model.config.num_attention_heads, runner.kv_cache[0], dtype)
            if adapters is not None:
                adapters.warm_up()
    if use_graphs:
        vision = vision_attention is not None and _uses_graphs(config, device, vision_attention)
        runner.capture_graphs(config.max_num_seqs, max_model_len, vision)
    return runner


def _adapters(config: EngineConfig, model: Model, dtype: torch.dtype, device: torch.device) -> DeviceAdapters | None:
    """The slots for adapters of requests, allocated before the memory for the KV cache is measured."""
    return DeviceAdapters(model, config.max_loras, config.max_lora_rank, dtype, device) if config.enable_lora else None


def _attention(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[type[AttentionBackend], type[AttentionBackend] | None]:
    """The backends of the decoder and of the ViT, if there is one."""
    with current_device(device):
        options = (config.kvcache_block_size, config.resolve_kv_dtype(dtype))
        decoder, reason = choose_attention(config.attention_backend, model_config.head_dim, device, dtype, *options)
        logger.info("attention backend: %s (%s)", decoder.name, reason)
        if model_config.vision is None:
            return decoder, None
        vision, reason = choose_vision_attention(
            config.vision_attention_backend, config.attention_backend, model_config.vision.head_dim, device, dtype
        )
    logger.info("attention backend of the ViT: %s (%s)", vision.name, reason)
    return decoder, vision


def _uses_graphs(config: EngineConfig, device: torch.device, attention: type[AttentionBackend]) -> bool:
    return device.type == "cuda" and attention.in_graphs and not config.enforce_eager


def _max_model_len(config: EngineConfig, model_config: ModelConfig, num_blocks: int, block_size: int) -> int:
    """The user's choice or the checkpoint's; a default is cut to what the KV cache can hold of one sequence."""
    limit, asked, capacity = model_config.max_position_embeddings, config.max_model_len, num_blocks * block_size
    if asked is not None and asked > limit:
        raise ValueError(f"max_model_len is {asked}; the checkpoint supports at most {limit}")
    if asked is not None and asked > capacity:
        raise ValueError(
            f"max_model_len is {asked}, but the KV cache holds {capacity} tokens "
            f"({num_blocks} blocks of {block_size}); lower it"
        )
    if asked is None and capacity < limit:
        logger.warning("max_model_len is %d, not the checkpoint's %d: more does not fit the KV cache", capacity, limit)
    return asked or min(limit, capacity)
