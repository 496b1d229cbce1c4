"""Predicts the memory that a model needs from its config, without its weights, for `mmvllm info`.

If several devices share a model, the prediction is for the first, which needs at least as much as the others.
"""

import torch

from mmvllm.config import EngineConfig, ModelConfig, torch_dtype
from mmvllm.layers.attention import AttentionBackend
from mmvllm.layers.linear import weight_bytes
from mmvllm.models.interface import Model
from mmvllm.models.quant_methods import choose_linear_methods, keep_quantized
from mmvllm.models.registry import family_of
from mmvllm.models.splitting import PlannedRank, rank_config
from mmvllm.processes.ranks import SINGLE, Ranks
from mmvllm.worker.memory import affordable_blocks, kv_block_bytes

# Memory of a process beside weights and caches: the interpreter, torch, transformers, a tokenizer of 150,000 tokens and
# the tensors of a step. 590 to 670 MiB were measured with Qwen3-VL-2B and Qwen2.5-VL-3B, images of 448x448.
PROCESS_BYTES = 640 * 2**20
SHOWN_DTYPES = ("float32", "bfloat16", "float16")


class Memory:
    """The memory of one model on each of its devices, as rows of text by name.

    Raises ValueError for a number of devices that the model cannot be split over.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine_config: EngineConfig,
        attention: type[AttentionBackend],
        device: torch.device,
    ):
        self.engine_config, self.device = engine_config, device
        self.ranks = PlannedRank(0, engine_config.tensor_parallel_size)
        self.whole_config, self.config = config, rank_config(config, self.ranks.size)
        self.block_size = engine_config.kvcache_block_size or attention.block_size
        self.attention = attention
        self.encoder_cache_bytes = engine_config.encoder_cache_bytes if config.vision else 0

    def sections(self, dtype: torch.dtype) -> dict[str, dict[str, str]]:
        """Return all rows by the titles of sections, for an engine that runs in this dtype."""
        size, needed = self.ranks.size, f"memory needed on {self.device.type}"
        if size == 1:
            return {"memory": self.rows(dtype), f"{needed}, by dtype": self.by_dtype()}
        return {
            f"weights of each of {size} devices": slices(self.whole_config, size),
            f"memory of each of {size} devices": self.rows(dtype),
            f"{needed} by each of {size} processes, by dtype": self.by_dtype(),
        }

    def rows(self, dtype: torch.dtype) -> dict[str, str]:
        """Return the memory that the engine would use in its dtype."""
        num_blocks, block_bytes = self._num_blocks(dtype), self._block_bytes(dtype)
        note = "" if self.device.type == "cpu" else " at most; the engine measures the exact number when it starts"
        size = f"{num_blocks * block_bytes / 2**20:.1f} MiB"
        return {
            "weights": f"{self._weights(dtype) / 2**20:.1f} MiB{self._copied(dtype)}",
            "KV block": f"{block_bytes / 2**10:.1f} KiB for {self.block_size} tokens",
            "KV cache": f"{num_blocks} blocks, {num_blocks * self.block_size} tokens, {size}{note}",
            "longest sequence": f"{min(num_blocks * self.block_size, self.config.max_position_embeddings)} tokens",
            "encoder cache": f"{self.encoder_cache_bytes / 2**20:.0f} MiB",
        }

    def _copied(self, dtype: torch.dtype) -> str:
        """Return the size of the ViT, which every device has whole."""
        if self.ranks.size == 1 or self.config.vision is None:
            return ""
        return f", {weight_bytes(self._model(dtype).visual, dtype) / 2**20:.1f} MiB of them the ViT"

    def by_dtype(self) -> dict[str, str]:
        """Return the memory of a process with full caches; on a GPU without the KV cache, which takes the rest."""
        rows = {name: self._needed(torch_dtype(name)) for name in SHOWN_DTYPES}
        kinds = ("int8", "int4") if self.device.type == "cpu" else ("fp8", "int4")
        return rows | {kind: self._needed(torch.bfloat16, kind) for kind in kinds}

    def _needed(self, dtype: torch.dtype, quantization: str | None = None) -> str:
        """Return the sum, or why this quantization is not supported."""
        try:
            model = self._model(dtype, quantization)
        except ValueError as error:
            return str(error)
        parts = {"weights": weight_bytes(model, dtype)}
        if self.device.type == "cpu":
            parts["KV cache"] = self._num_blocks(dtype) * self._block_bytes(dtype)
        if self.config.vision:
            parts["encoder cache"] = self.encoder_cache_bytes
        return _sum_text(parts | ({"the process itself": PROCESS_BYTES} if self.device.type == "cpu" else {}))

    def _weights(self, dtype: torch.dtype) -> int:
        return weight_bytes(self._model(dtype), dtype)

    def _model(self, dtype: torch.dtype, quantization: str | None = None) -> Model:
        model = without_weights(self.whole_config, self.attention, self.ranks)
        choose_linear_methods(model, self.device, dtype, quantization)
        if self.whole_config.quantization is not None and quantization is None:
            keep_quantized(model, self.device, dtype)
        return model

    def _num_blocks(self, dtype: torch.dtype) -> int:
        if self.device.type == "cpu":
            budget = self.engine_config.cpu_kvcache_bytes
        else:
            free, total = torch.cuda.mem_get_info(self.device)
            budget = int(total * self.engine_config.gpu_memory_utilization) - (total - free)
            budget -= self._weights(dtype) + self.encoder_cache_bytes
        kv_dtype = self.engine_config.resolve_kv_dtype(dtype)
        return affordable_blocks(budget, self.engine_config, self.config, self.block_size, kv_dtype)

    def _block_bytes(self, dtype: torch.dtype) -> int:
        return kv_block_bytes(self.config, self.block_size, self.engine_config.resolve_kv_dtype(dtype))


def slices(config: ModelConfig, size: int) -> dict[str, str]:
    """Return the part of the weights that each of several devices has, by name."""
    own, experts, K = rank_config(config, size), config.experts, config.num_key_value_heads
    copies = f", each on {size // K} devices" if size > K else ""
    rows = {
        "query heads": f"{own.num_attention_heads} of {config.num_attention_heads}",
        "key-value heads": f"{own.num_key_value_heads} of {K}{copies}",
    }
    if experts is None or experts.dense_layers:
        rows["MLP"] = _part_text(config.intermediate_size, size)
    if experts is not None:
        rows["experts"] = _part_text(experts.num_experts, size)
    rows["vocabulary"] = _part_text(config.vocab_size, size)
    return rows | ({"ViT": "all of it"} if config.vision else {})


def _part_text(whole: int, size: int) -> str:
    return f"{'at most ' if whole % size else ''}{-(-whole // size)} of {whole}"


def without_weights(config: ModelConfig, attention: type[AttentionBackend], ranks: Ranks = SINGLE) -> Model:
    """Build the rank's part of a model on the meta device."""
    with torch.device("meta"):
        model = family_of(config.architecture).build(config, attention, ranks=ranks)
    model.tie_head()
    return model


def _sum_text(parts: dict[str, int]) -> str:
    return f"{_gib(sum(parts.values()))} = {' + '.join(f'{name} {_gib(size)}' for name, size in parts.items())}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
