"""The memory that published checkpoints take on each of the devices that share one, computed from their sizes."""

from typing import Any

import torch

from mmvllm.cli.info_memory import without_weights
from mmvllm.config import ModelConfig
from mmvllm.layers.attention import TorchAttention
from mmvllm.layers.linear import weight_bytes
from mmvllm.models.qwen2_vl.config import MROPE_SECTION
from mmvllm.models.registry import family_of
from mmvllm.models.splitting import PlannedRank, possible_sizes
from mmvllm.worker.memory import kv_block_bytes

BFLOAT16, CUDA = torch.bfloat16, torch.device("cuda")
NUMBERS_OF_DEVICES = (1, 2, 4, 8)
HEADER = ("model in bfloat16", *(f"{n} device{'s' * (n > 1)}" for n in NUMBERS_OF_DEVICES))


def _sizes(C: int, I: int, layers: int, H: int, K: int, V: int, D: int = 128) -> dict[str, Any]:  # noqa: E741
    """Sizes of a decoder by their names in config.json."""
    return {
        "hidden_size": C,
        "intermediate_size": I,
        "num_hidden_layers": layers,
        "num_attention_heads": H,
        "num_key_value_heads": K,
        "vocab_size": V,
        "head_dim": D,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }


def _qwen2_vl(*sizes: int, tied: bool = False) -> ModelConfig:
    text = _sizes(*sizes) | {"tie_word_embeddings": tied, "rope_scaling": {"mrope_section": list(MROPE_SECTION)}}
    return _config("Qwen2VLForConditionalGeneration", text | {"vision_config": {"hidden_size": sizes[0]}})


def _qwen3_vl(*sizes: int, **experts: int) -> ModelConfig:
    kind = "Qwen3VLMoeForConditionalGeneration" if experts else "Qwen3VLForConditionalGeneration"
    return _config(kind, {"text_config": _sizes(*sizes) | experts, "vision_config": {"out_hidden_size": sizes[0]}})


def _config(architecture: str, raw: dict[str, Any]) -> ModelConfig:
    return family_of(architecture).parse_config(architecture, raw, {})


_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
PUBLISHED = {
    "Qwen2-VL-2B": _qwen2_vl(1536, 8960, 28, 12, 2, 151936, tied=True),
    "Qwen2-VL-7B": _qwen2_vl(3584, 18944, 28, 28, 4, 152064),
    "Qwen3-VL-32B": _qwen3_vl(5120, 25600, 64, 64, 8, 151936),
    "Qwen2-VL-72B": _qwen2_vl(8192, 29568, 80, 64, 8, 152064),
    "Qwen3-VL-30B-A3B": _qwen3_vl(2048, 6144, 48, 32, 4, 151936, moe_intermediate_size=768, **_EXPERTS),
    "Qwen3-VL-235B-A22B": _qwen3_vl(4096, 12288, 94, 64, 4, 151936, moe_intermediate_size=1536, **_EXPERTS),
}


def device_bytes(config: ModelConfig, size: int) -> tuple[int, int]:
    """Bytes of the weights in bfloat16 on the first of `size` GPUs, and of one token in its KV cache."""
    model = without_weights(config, TorchAttention, PlannedRank(0, size))
    return weight_bytes(model, BFLOAT16), kv_block_bytes(model.config, 1, BFLOAT16)


def memory_rows() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The header and the rows of the table: weights and 1,000 tokens of the KV cache on each device."""
    rows = [(name, *(_cell(config, size) for size in NUMBERS_OF_DEVICES)) for name, config in PUBLISHED.items()]
    return HEADER, rows


def _cell(config: ModelConfig, size: int) -> str:
    if size not in possible_sizes(config):
        return "cannot be split"
    weights, token = device_bytes(config, size)
    return f"{weights / 2**30:.1f} GiB, {1000 * token / 2**20:.0f} MiB"
