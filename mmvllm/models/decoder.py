"""The decoder that all families share, over a paged KV cache."""

from collections.abc import Sequence

from torch import Tensor, nn

from mmvllm.config import ModelConfig
from mmvllm.kernels.common.kv_cache import KVCache
from mmvllm.kernels.fp8 import Fp8Rows
from mmvllm.kernels.rotary import rotary_write_kv
from mmvllm.kernels.splice import splice_add
from mmvllm.layers.attention import AttentionBackend
from mmvllm.layers.batch import Batch
from mmvllm.layers.experts import SparseMLP
from mmvllm.layers.linear import Linear, MergedLinear
from mmvllm.layers.mlp import GatedMLP
from mmvllm.layers.norm import RMSNorm
from mmvllm.layers.sharding import Shard
from mmvllm.layers.vocabulary import VocabularyEmbedding
from mmvllm.models.rotary import mrope_cos_sin
from mmvllm.models.splitting import key_value_heads, query_heads
from mmvllm.processes.ranks import SINGLE, Ranks


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) that writes keys and values to the KV cache and reads them from there.

    Each rank has a part of the heads; the sum of the ranks' results is the result of all heads.
    """

    def __init__(self, config: ModelConfig, backend: type[AttentionBackend], ranks: Ranks = SINGLE):
        super().__init__()
        self.head_dim = config.head_dim
        self.backend = backend
        q_size, kv_size = (heads(config, ranks).times(config.head_dim) for heads in (query_heads, key_value_heads))
        self.qkv_proj = MergedLinear(config.hidden_size, [q_size, kv_size, kv_size], bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor | Fp8Rows, cos: Tensor, sin: Tensor, kv_cache: KVCache, batch: Batch) -> Tensor:
        qkv = self.qkv_proj(x, batch.adapters)
        q, k, v = (part.unflatten(1, (-1, self.head_dim)) for part in qkv)  # (N, H, D), twice (N, K, D)
        k_cache, v_cache = kv_cache
        norms = None if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q = rotary_write_kv(q, k, v, cos, sin, k_cache, v_cache, batch.slot_mapping, norms)
        return self.o_proj(self.backend.paged(q, k_cache, v_cache, batch).flatten(1), batch.adapters)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, backend: type[AttentionBackend], ranks: Ranks = SINGLE):
        super().__init__()
        self.ranks = ranks
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, backend, ranks)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _mlp(config, index, ranks)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, kv_cache: KVCache, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Map the previous layer's output and residual, both (N, C), to this layer's output and residual."""
        x, residual = self._normalized(self.input_layernorm, x, residual)
        x = self.ranks.all_reduce(self.self_attn(x, cos, sin, kv_cache, batch))
        x, residual = self._normalized(self.post_attention_layernorm, x, residual)
        return self.ranks.all_reduce(self.mlp(x, batch.adapters)), residual

    def _normalized(self, norm: RMSNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor | Fp8Rows, Tensor]:
        return norm.add_fp8(x, residual) if self.is_fp8 else norm.add(x, residual)

    @property
    def is_fp8(self) -> bool:
        """Whether the weights are 8-bit floats; the norms and the MLP's activation then round their inputs."""
        return self.self_attn.qkv_proj.is_fp8


def _mlp(config: ModelConfig, index: int, ranks: Ranks) -> GatedMLP | SparseMLP:
    if config.experts is None or index in config.experts.dense_layers:
        return GatedMLP(config.hidden_size, Shard.cut(config.intermediate_size, ranks))
    return SparseMLP(config.hidden_size, config.experts, ranks)


class Decoder(nn.Module):
    """The decoder's layers, from embedded tokens to hidden states, which are equal on all ranks."""

    def __init__(self, config: ModelConfig, backend: type[AttentionBackend], ranks: Ranks = SINGLE):
        super().__init__()
        self.config = config
        self.embed_tokens = VocabularyEmbedding(config.vocab_size, config.hidden_size, ranks)
        self.layers = nn.ModuleList(DecoderLayer(config, i, backend, ranks) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, kv_cache: KVCache, batch: Batch, deepstack: Sequence[Tensor]) -> Tensor:
        """Return the hidden states (R, C) of `batch.logits_indices`, and write keys and values to kv_cache.

        x (N, C) are embedded tokens; kv_cache is (layers, 2, num_blocks, block_size, K, D). `deepstack` (arXiv
        2406.04334) has embeddings (M, C) to add to the outputs of the first layers; as in transformers, embeddings for
        layers that do not exist are ignored.
        """
        cos, sin = mrope_cos_sin(batch.positions, self.config, x.dtype)
        residual = None
        for i, (layer, layer_cache) in enumerate(zip(self.layers, kv_cache, strict=True)):
            x, residual = layer(x, residual, cos, sin, layer_cache, batch)
            if i < len(deepstack):
                splice_add(x, deepstack[i], batch.mm_token_indices)
        return self.norm.add(x[batch.logits_indices], residual[batch.logits_indices])[0]
