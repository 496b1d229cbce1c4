"""The shapes of the small random checkpoints: sizes that a model could assume equal, even or round are not."""

import pytest

SHAPES = {
    # The ratio of query to KV heads, the depth, tied embeddings and the M-RoPE sections vary.
    "gqa2-tied": {
        "family": "qwen2_vl",
        "text": {"heads": 4, "kv_heads": 2, "layers": 2, "section": [2, 3, 3]},
        "vision": {"depth": 3, "embed_dim": 48, "num_heads": 3, "mlp_ratio": 2},
        "tied": True,
    },
    "gqa3-untied": {
        "family": "qwen2_vl",
        "text": {"heads": 6, "kv_heads": 2, "layers": 3, "section": [4, 2, 2]},
        "vision": {"depth": 1, "embed_dim": 48, "num_heads": 3, "mlp_ratio": 2},
        "tied": False,
    },
    "mha-untied": {
        "family": "qwen2_vl",
        "text": {"heads": 2, "kv_heads": 2, "layers": 1, "section": [2, 2, 4]},
        "vision": {"depth": 2, "embed_dim": 48, "num_heads": 3, "mlp_ratio": 2},
        "tied": False,
    },
    "mqa-tied": {
        "family": "qwen2_vl",
        "text": {"heads": 5, "kv_heads": 1, "layers": 5, "section": [3, 3, 2]},
        "vision": {"depth": 2, "embed_dim": 48, "num_heads": 3, "mlp_ratio": 2},
        "tied": True,
    },
    # Windows of 4x4, 2x2, 1x1 and 3x3 merged patches; inner sizes of the ViT's MLP that are padded, one not.
    "windows4-tied": {
        "family": "qwen2_5_vl",
        "text": {"heads": 6, "kv_heads": 2, "layers": 3, "section": [2, 3, 3]},
        "vision": {
            "depth": 3,
            "hidden_size": 48,
            "num_heads": 3,
            "intermediate_size": 92,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        "tied": True,
    },
    "windows2-vit80-untied": {
        "family": "qwen2_5_vl",
        "text": {"heads": 4, "kv_heads": 1, "layers": 2, "section": [4, 2, 2]},
        "vision": {
            "depth": 2,
            "hidden_size": 160,
            "num_heads": 2,
            "intermediate_size": 171,
            "window_size": 56,
            "fullatt_block_indexes": [0],
        },
        "tied": False,
    },
    "windows1-vit64-tied": {
        "family": "qwen2_5_vl",
        "text": {"heads": 5, "kv_heads": 1, "layers": 1, "section": [3, 3, 2]},
        "vision": {
            "depth": 5,
            "hidden_size": 64,
            "num_heads": 1,
            "intermediate_size": 75,
            "window_size": 28,
            "fullatt_block_indexes": [0, 4],
        },
        "tied": True,
    },
    "windows3-only-untied": {
        "family": "qwen2_5_vl",
        "text": {"heads": 2, "kv_heads": 2, "layers": 2, "section": [2, 2, 4]},
        "vision": {
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 64,
            "window_size": 84,
            "fullatt_block_indexes": [],
        },
        "tied": False,
    },
    # One, two or three DeepStack layers; position tables of 3x3 to 48x48; heads that do not add up to the hidden size.
    "deepstack3-tied": {
        "family": "qwen3_vl",
        "text": {"heads": 4, "kv_heads": 2, "layers": 4, "head_dim": 24, "section": [6, 4, 2]},
        "vision": {
            "depth": 5,
            "hidden_size": 48,
            "num_heads": 3,
            "intermediate_size": 100,
            "num_position_embeddings": 7 * 7,
            "deepstack_visual_indexes": [0, 2, 3],
        },
        "tied": True,
    },
    "deepstack1-vit72-untied": {
        "family": "qwen3_vl",
        "text": {"heads": 6, "kv_heads": 2, "layers": 2, "head_dim": 16, "hidden_size": 56, "section": [4, 2, 2]},
        "vision": {
            "depth": 2,
            "hidden_size": 144,
            "num_heads": 2,
            "intermediate_size": 90,
            "num_position_embeddings": 48 * 48,
            "deepstack_visual_indexes": [1],
        },
        "tied": False,
    },
    "deepstack2-vit64-tied": {
        "family": "qwen3_vl",
        "text": {"heads": 5, "kv_heads": 1, "layers": 3, "head_dim": 32, "section": [6, 5, 5]},
        "vision": {
            "depth": 3,
            "hidden_size": 64,
            "num_heads": 1,
            "intermediate_size": 128,
            "num_position_embeddings": 3 * 3,
            "deepstack_visual_indexes": [0, 1],
        },
        "tied": True,
    },
    "deepstack3-vit80-untied": {
        "family": "qwen3_vl",
        "text": {"heads": 3, "kv_heads": 3, "layers": 3, "head_dim": 16, "hidden_size": 64, "section": [3, 3, 2]},
        "vision": {
            "depth": 3,
            "hidden_size": 80,
            "num_heads": 1,
            "intermediate_size": 61,
            "num_position_embeddings": 12 * 12,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        "tied": False,
    },
    # Dense layers among those with experts, named one by one, none, and every second one.
    "experts8-top3": {
        "family": "qwen3_vl_moe",
        "text": {
            "heads": 4,
            "kv_heads": 2,
            "layers": 4,
            "head_dim": 24,
            "section": [6, 4, 2],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
        "vision": {
            "depth": 3,
            "hidden_size": 48,
            "num_heads": 3,
            "intermediate_size": 100,
            "num_position_embeddings": 7 * 7,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        "tied": False,
    },
    "experts4-top2-vit72": {
        "family": "qwen3_vl_moe",
        "text": {
            "heads": 6,
            "kv_heads": 2,
            "layers": 3,
            "head_dim": 16,
            "hidden_size": 56,
            "section": [4, 2, 2],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
        },
        "vision": {
            "depth": 2,
            "hidden_size": 144,
            "num_heads": 2,
            "intermediate_size": 72,
            "num_position_embeddings": 5 * 5,
            "deepstack_visual_indexes": [1],
        },
        "tied": False,
    },
    "experts16-top8-tied": {
        "family": "qwen3_vl_moe",
        "text": {
            "heads": 5,
            "kv_heads": 1,
            "layers": 5,
            "head_dim": 16,
            "section": [3, 3, 2],
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 2,
        },
        "vision": {
            "depth": 3,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "num_position_embeddings": 4 * 4,
            "deepstack_visual_indexes": [0, 2],
        },
        "tied": True,
    },
    "qwen2-gqa3-tied": {
        "family": "qwen2",
        "text": {"heads": 6, "kv_heads": 2, "layers": 3, "intermediate_size": 80},
        "tied": True,
    },
    "qwen2-gqa3-untied": {
        "family": "qwen2",
        "text": {"heads": 6, "kv_heads": 2, "layers": 3, "intermediate_size": 80},
        "tied": False,
    },
    "qwen3-wide-heads-tied": {
        "family": "qwen3",
        "text": {"heads": 6, "kv_heads": 2, "layers": 3, "head_dim": 24, "hidden_size": 80},
        "tied": True,
    },
    "qwen3-mqa-untied": {
        "family": "qwen3",
        "text": {"heads": 3, "kv_heads": 1, "layers": 2, "head_dim": 16, "hidden_size": 64},
        "tied": False,
    },
    "qwen3-mha-untied": {
        "family": "qwen3",
        "text": {"heads": 2, "kv_heads": 2, "layers": 1, "head_dim": 64, "hidden_size": 72},
        "tied": False,
    },
}
TEXT_SHAPES = tuple(name for name, shape in SHAPES.items() if "vision" not in shape)
IMAGE_SHAPES = tuple(name for name in SHAPES if name not in TEXT_SHAPES)
# Of each family that takes images, the shape that has most of what can go wrong.
RICHEST = ("gqa2-tied", "windows4-tied", "deepstack3-tied", "experts8-top3")
every_family = pytest.mark.parametrize("checkpoint", RICHEST, indirect=True)
others_slow = [RICHEST[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in RICHEST[1:])]
one_family = pytest.mark.parametrize("checkpoint", others_slow, indirect=True)  # and with the slow tests every one
