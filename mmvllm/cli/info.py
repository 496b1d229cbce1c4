"""`mmvllm info`: versions, devices, the model and what is supported for it, attention backends, and memory."""

import argparse

from mmvllm.cli.checks import check
from mmvllm.cli.common import add_model_argument
from mmvllm.cli.options import add_options, given_options
from mmvllm.config import EngineConfig

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "flash-attn-4", "torchvision", "av")
SHOWN = (
    *("device", "tensor_parallel_size", "dtype", "max_model_len", "max_num_seqs", "gpu_memory_utilization"),
    *("cpu_kvcache_bytes", "kv_cache_dtype", "encoder_cache_bytes"),
    *("attention_backend", "vision_attention_backend"),
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
    add_options(parser, EngineConfig, SHOWN)


def run(args: argparse.Namespace) -> int:
    check(args)

    from mmvllm.bench.report import versions
    from mmvllm.cli.info_memory import Memory
    from mmvllm.layers.attention_choice import choose_attention, unusable_backends
    from mmvllm.models.folder import resolve_folder
    from mmvllm.models.registry import load_config

    engine_config = EngineConfig(**given_options(args, EngineConfig))
    device = engine_config.resolve_device()
    folder = resolve_folder(args.model, with_weights=False)
    config = load_config(folder)
    dtype = engine_config.resolve_dtype(config.dtype, device, config.quantization is not None)
    options = (config.head_dim, device, dtype, engine_config.kvcache_block_size, engine_config.resolve_kv_dtype(dtype))
    attention, reason = choose_attention(engine_config.attention_backend, *options)
    memory = Memory(config, engine_config.with_limits(device), attention, device)
    sections = {
        "versions": {name: text or "not installed" for name, text in versions(*PACKAGES).items()},
        "devices": _devices(engine_config.gpu_memory_utilization),
        "model": _model(folder, config) | {"runs in": f"{dtype} on {device}".replace("torch.", "")},
        "attention": {
            **{name: reason or "usable" for name, reason in unusable_backends(*options).items()},
            "chosen": f"{attention.name} ({reason})",
            **_vision_attention(config, engine_config, device, dtype),
        },
        **memory.sections(dtype),
    }
    for title, rows in sections.items():
        print(title)
        for name, value in rows.items():
            print(f"  {name:<16} {value}")
    return 0


def _devices(memory_share: float) -> dict[str, str]:
    import os

    import torch

    from mmvllm.utils.devices import cuda_unusable, unsupported_accelerators

    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        properties, reason = torch.cuda.get_device_properties(i), cuda_unusable(i, memory_share)
        left_out = f"; not taken by --device auto: {reason}" if reason else ""
        devices[f"cuda:{i}"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB{left_out}"
    if len(devices) == 1:
        devices["cuda"] = "none that this torch can use"
    return devices | dict.fromkeys(unsupported_accelerators(), "not supported")


def _model(folder, config) -> dict[str, str]:
    from mmvllm.models.registry import FAMILIES

    return {
        "folder": str(folder),
        "architecture": config.architecture,
        "family": FAMILIES[config.architecture].rpartition(".")[2],
        "parameters": _parameters(config),
        "context": f"{config.max_position_embeddings} tokens at most in one sequence",
        "images": _images(folder, config),
        "videos": _videos(folder, config),
        "weights": str(config.quantization or "not quantized"),
    }


def _parameters(config) -> str:
    from mmvllm.bench.costs import ModelCosts

    costs = ModelCosts(config)
    parts = {"ViT": costs.num_parameters["vision"]} if config.vision else {}
    parts["decoder"] = sum(costs.num_parameters.values()) - costs.num_parameters["vision"]
    text = f"{_millions(sum(parts.values()))} ({', '.join(f'{name} {_millions(n)}' for name, n in parts.items())})"
    if config.experts is None:
        return text
    active, experts = round(costs.num_expert_parameters * costs.active_share), config.experts
    used = f"{experts.num_experts_per_tok} of {experts.num_experts} experts in a layer"
    return f"{text}; {_millions(costs.num_expert_parameters)} in experts, {_millions(active)} active: {used}"


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f} M"


def _images(folder, config) -> str:
    from mmvllm.models.registry import load_image_config

    if config.vision is None:
        return "none: this checkpoint is text-only"
    side = config.vision.patch_size * config.vision.spatial_merge_size
    size = f"one token per {side}x{side} pixels"
    try:
        images = load_image_config(folder)
    except ValueError as error:  # a folder without preprocessor_config.json, for example
        return f"{size}, but no model is loaded from this folder: {error}"
    return f"{size}; {-(-images.min_pixels // side**2)} to {images.max_pixels // side**2} tokens each"


def _videos(folder, config) -> str:
    from mmvllm.models.registry import family_of, load_media_configs
    from mmvllm.processors.videos.clip import VideoInfo
    from mmvllm.processors.videos.processor import ClipPlan

    if config.vision is None:
        return "none: this checkpoint is text-only"
    if not family_of(config.architecture).media_rules(config).takes_videos:
        return "none: this checkpoint has no token for them"
    try:
        videos = load_media_configs(folder)[1]
    except ValueError:  # named in the line on images
        return "one temporal patch per 2 frames"
    info = VideoInfo(total_num_frames=1800, fps=30.0, height=720, width=1280)
    num_frames, num_tokens = len(videos.frame_indices(info)), ClipPlan(videos).num_tokens(info)
    text = f"60 seconds of 1280x720 are {num_frames} frames and {num_tokens} tokens by default"
    return text if num_tokens < config.max_position_embeddings else f"{text}, more than the context"


def _vision_attention(config, engine_config, device, dtype) -> dict[str, str]:
    from mmvllm.layers.attention_choice import choose_vision_attention

    if config.vision is None:
        return {}
    names = (engine_config.vision_attention_backend, engine_config.attention_backend)
    attention, reason = choose_vision_attention(*names, config.vision.head_dim, device, dtype)
    return {"chosen for ViT": f"{attention.name} ({reason})"}
