"""Parameters, bytes and floating-point operations of a model, from its config alone.

Letters as in `engine/batch.py`; E is the ViT's width, I the width inside an MLP. A multiply and its add are two
operations; only matrix products and attention are counted, beside which the rest is little.
"""

from mmvllm.config import ModelConfig, VisionConfig


def num_parameters(config: ModelConfig) -> dict[str, int]:
    """By part; a tied head counts in "embedding" alone, and "decoder" is the layers and the last norm."""
    C, embedding = config.hidden_size, config.vocab_size * config.hidden_size
    q_size, kv_size = _attention_sizes(config)
    biases_and_norms = q_size + 2 * kv_size + 2 * C
    return {
        "vision": vision_parameters(config.vision) if config.vision else 0,
        "decoder": config.num_hidden_layers * (_layer_weights(config) + biases_and_norms) + C,
        "embedding": embedding,
        "head": 0 if config.tie_word_embeddings else embedding,
    }


def weights_read_by_a_step(config: ModelConfig) -> int:
    """However few tokens it computes: the decoder's and the head's; of untied embeddings next to nothing."""
    return num_parameters(config)["decoder"] + config.vocab_size * config.hidden_size


def vision_parameters(v: VisionConfig) -> int:
    """Weights of the products, and the biases and norms (scale and shift each) beside them."""
    E, width = v.embed_dim, v.embed_dim * v.spatial_merge_size**2
    # A block's biases: qkv 3 E, proj E, fc1 I, fc2 E; its two norms: 4 E.
    block = (9 + v.mlp_ratio) * E
    merger = 2 * E + width + v.hidden_size
    return _patch_weights(v) + v.depth * block + merger + _merger_weights(v)


def vision_flops(v: VisionConfig, num_patches: int) -> int:
    """Of one picture with one frame: every patch through every weight, the merger once per merged row.

    Attention in a block is P**2 products of queries with keys and as many of weights with values, 2 E operations each.
    """
    rows = num_patches // v.spatial_merge_size**2
    attention = v.depth * 4 * num_patches**2 * v.embed_dim
    return 2 * _patch_weights(v) * num_patches + 2 * _merger_weights(v) * rows + attention


def decoder_flops(config: ModelConfig, num_tokens: int, num_keys: float) -> float:
    """Of all layers; `num_keys` is what the tokens see, summed over them.

    Every token goes through every weight, and in each layer 4 H D operations join it with each key and value it sees.
    """
    attention = 4 * _attention_sizes(config)[0] * num_keys
    return config.num_hidden_layers * (2 * _layer_weights(config) * num_tokens + attention)


def keys_seen(first: int, last: int) -> int:
    """Keys that the tokens [first, last) of a sequence see: themselves and all before them, the causal half."""
    return last * (last + 1) // 2 - first * (first + 1) // 2


def head_flops(config: ModelConfig, num_rows: int) -> int:
    """Of the logits, which only rows that want a token get."""
    return 2 * config.vocab_size * config.hidden_size * num_rows


def _attention_sizes(config: ModelConfig) -> tuple[int, int]:
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


def _layer_weights(config: ModelConfig) -> int:
    """Of a layer's products: queries, keys and values, output (C H D), and the MLP's gate, up and down (C I)."""
    q_size, kv_size = _attention_sizes(config)
    return config.hidden_size * (2 * q_size + 2 * kv_size + 3 * config.intermediate_size)


def _patch_weights(v: VisionConfig) -> int:
    """What each patch goes through: the embedding, and in a block qkv (3 E**2), proj (E**2), fc1 and fc2 (E I)."""
    return v.patch_dim * v.embed_dim + v.depth * (4 + 2 * v.mlp_ratio) * v.embed_dim**2


def _merger_weights(v: VisionConfig) -> int:
    width = v.embed_dim * v.spatial_merge_size**2
    return width * width + width * v.hidden_size
