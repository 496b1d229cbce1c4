"""The Qwen2 decoder over a paged KV cache."""

import torch.nn.functional as F
from torch import Tensor, nn

from mmvllm.config import ModelConfig
from mmvllm.engine.batch import Batch
from mmvllm.layers.attention import paged_attention, write_kv
from mmvllm.layers.linear import MergedLinear
from mmvllm.layers.norm import RMSNorm
from mmvllm.models.rotary import apply_rotary, mrope_cos_sin


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245): keys and values go to the cache, queries read all from there."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.qkv_proj = MergedLinear(config.hidden_size, [q_size, kv_size, kv_size], bias=True)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in self.qkv_proj(x))  # (N, H, D), twice (N, K, D)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        k_cache, v_cache = kv_cache
        write_kv(k, v, k_cache, v_cache, batch.slot_mapping)
        return self.o_proj(paged_attention(q, k_cache, v_cache, batch).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up_proj = MergedLinear(config.hidden_size, [config.intermediate_size] * 2, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, kv_cache, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedded tokens -> hidden states."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, kv_cache: Tensor, batch: Batch) -> Tensor:
        """x (N, C), kv_cache (layers, 2, num_blocks, block_size, K, D), written in place -> hidden states (N, C)."""
        c = self.config
        cos, sin = mrope_cos_sin(batch.positions, c.head_dim, c.rope_theta, c.mrope_section, x.dtype)
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            x = layer(x, cos, sin, layer_cache, batch)
        return self.norm(x)
