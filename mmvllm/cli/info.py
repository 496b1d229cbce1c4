"""`mmvllm info`: versions, devices, attention backends, and the size of the KV cache."""

import argparse

from mmvllm.cli.checks import check
from mmvllm.cli.common import add_model_argument
from mmvllm.cli.engine_options import add_engine_arguments, engine_arguments

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "torchvision")
SHOWN = (
    *("device", "dtype", "max_model_len", "max_num_seqs", "gpu_memory_utilization", "cpu_kvcache_bytes"),
    *("encoder_cache_bytes", "attention_backend"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        *("--block-size", "--kvcache-block-size"),
        type=int,
        metavar="N",
        dest="kvcache_block_size",
        help="tokens per KV cache block (default: 256 for FlashAttention, from flash-attn or torch, otherwise 16)",
    )
    add_engine_arguments(parser, only=SHOWN)


def run(args: argparse.Namespace) -> int:
    check(args)

    from mmvllm.bench.report import versions
    from mmvllm.config import EngineConfig
    from mmvllm.layers.attention import choose_attention
    from mmvllm.models.folder import resolve_folder
    from mmvllm.models.registry import load_config

    engine_config = EngineConfig(**engine_arguments(args))
    device = engine_config.resolve_device()
    folder = resolve_folder(args.model, with_weights=False)
    config = load_config(folder)
    dtype = engine_config.resolve_dtype(config.dtype, device)
    attention, reason = choose_attention(
        engine_config.attention_backend, config.head_dims, device, dtype, engine_config.kvcache_block_size
    )
    block_size = engine_config.kvcache_block_size or attention.block_size
    sections = {
        "versions": {name: text or "not installed" for name, text in versions(*PACKAGES).items()},
        "devices": _devices(engine_config.gpu_memory_utilization),
        "model": {
            "folder": str(folder),
            "architecture": config.architecture,
            "runs in": f"{dtype} on {device}".replace("torch.", ""),
        },
        "attention": {
            **_attention_backends(config.head_dims, device, dtype, engine_config.kvcache_block_size),
            "chosen": f"{attention.name} ({reason})",
        },
        "memory": _memory(config, engine_config, attention, block_size, device, dtype),
    }
    for title, rows in sections.items():
        print(title)
        for name, value in rows.items():
            print(f"  {name:<16} {value}")
    return 0


def _devices(memory_share: float) -> dict[str, str]:
    import os

    import torch

    from mmvllm.devices import cuda_unusable, unsupported_accelerators

    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        properties, reason = torch.cuda.get_device_properties(i), cuda_unusable(i, memory_share)
        left_out = f"; not taken by --device auto: {reason}" if reason else ""
        devices[f"cuda:{i}"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB{left_out}"
    if len(devices) == 1:
        devices["cuda"] = "none that this torch can use"
    return devices | dict.fromkeys(unsupported_accelerators(), "not supported")


def _attention_backends(head_dims, device, dtype, block_size: int | None) -> dict[str, str]:
    from mmvllm.layers.attention import unusable_backends

    reasons = unusable_backends(head_dims, device, dtype, block_size)
    return {name: reason or "usable" for name, reason in reasons.items()}


def _memory(config, engine_config, attention, block_size: int, device, dtype) -> dict[str, str]:
    import torch

    from mmvllm.engine.memory import affordable_blocks, kv_block_bytes
    from mmvllm.layers.linear import packs_well
    from mmvllm.models.registry import family_of

    with torch.device("meta"):
        num_parameters = sum(
            parameter.numel() for parameter in family_of(config.architecture).build(config, attention).parameters()
        )
    # On a CPU a tied head is a packed copy of the embedding.
    copied = config.tie_word_embeddings and device.type == "cpu" and packs_well(dtype)
    weights = (num_parameters + copied * config.vocab_size * config.hidden_size) * dtype.itemsize
    if device.type == "cpu":
        budget, note = engine_config.cpu_kvcache_bytes, ""
    else:
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * engine_config.gpu_memory_utilization) - (total - free) - weights
        budget -= engine_config.encoder_cache_bytes if config.vision else 0
        note = " at most; the engine measures the exact number when it starts"
    num_blocks = affordable_blocks(budget, engine_config, config, block_size, dtype)
    block_bytes = kv_block_bytes(config, block_size, dtype)
    size = num_blocks * block_bytes / 2**20
    return {
        "weights": f"{weights / 2**20:.1f} MiB ({num_parameters / 1e6:.1f} M parameters)",
        "KV block": f"{block_bytes / 2**10:.1f} KiB for {block_size} tokens",
        "KV cache": f"{num_blocks} blocks, {num_blocks * block_size} tokens, {size:.1f} MiB{note}",
        "encoder cache": f"{engine_config.encoder_cache_bytes / 2**20:.0f} MiB",
        "positions": f"{config.max_position_embeddings} at most in one sequence",
    }
