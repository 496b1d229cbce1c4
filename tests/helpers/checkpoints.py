"""Small random checkpoints, saved through transformers."""

import json
import shutil
from pathlib import Path

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from mmvllm.models.folder import BUNDLED

SMALL_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 140 * 140}


# The ratio of query to KV heads, the depth, tied embeddings and the M-RoPE sections vary.
SHAPES = {
    "gqa2-tied": {"heads": 4, "kv_heads": 2, "layers": 2, "depth": 3, "section": [2, 3, 3], "tied": True},
    "gqa3-untied": {"heads": 6, "kv_heads": 2, "layers": 3, "depth": 1, "section": [4, 2, 2], "tied": False},
    "mha-untied": {"heads": 2, "kv_heads": 2, "layers": 1, "depth": 2, "section": [2, 2, 4], "tied": False},
    "mqa-tied": {"heads": 5, "kv_heads": 1, "layers": 5, "depth": 2, "section": [3, 3, 2], "tied": True},
}


def make_checkpoint(folder: Path, shape: str) -> Path:
    """Save a random Qwen2-VL with the bundled tokenizer, through transformers."""
    torch.manual_seed(sum(map(ord, shape)))
    s, special = SHAPES[shape], json.loads((BUNDLED / "config.json").read_text())
    width = 16 * s["heads"]
    config = Qwen2VLConfig(
        vision_config={"depth": s["depth"], "embed_dim": 48, "num_heads": 3, "mlp_ratio": 2, "hidden_size": width},
        text_config={
            "vocab_size": 768,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": s["layers"],
            "num_attention_heads": s["heads"],
            "num_key_value_heads": s["kv_heads"],
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": s["section"]},
            "eos_token_id": special["text_config"]["eos_token_id"],
        },
        tie_word_embeddings=s["tied"],
        **{key: special[key] for key in special if key.endswith("_token_id")},
    )
    model = Qwen2VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        # Wide enough for logits to differ, so that completions do not repeat one token.
        parameter.data.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.15)
    model.generation_config.eos_token_id = config.text_config.eos_token_id
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder / name)
    (folder / "preprocessor_config.json").write_text(json.dumps({**SMALL_PIXELS, "patch_size": 14, "merge_size": 2}))
    return folder
