"""Writes folders with the published sizes of Qwen2-VL, without weights, for engines with `load_format="dummy"`.

The tokenizer and the ids of special tokens are the bundled model's; neither changes the cost of a step.
"""

import json
import shutil
from pathlib import Path

from mmvllm.models.folder import BUNDLED

# Hidden size, size inside the MLP, heads, KV heads, vocabulary, tied embeddings; 28 layers with heads of 128 values.
SIZES = {"2B": (1536, 8960, 12, 2, 151936, True), "7B": (3584, 18944, 28, 4, 152064, False)}
VISION = {
    **{"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_act": "quick_gelu"},
    **{"in_channels": 3, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2},
}
IMAGES = {
    **{"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    "image_processor_type": "Qwen2VLImageProcessor",
}


def write_checkpoint(folder: Path, size: str) -> Path:
    """Write the config of a size, "2B" or "7B", or copy the bundled model's for "bundled"; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in BUNDLED.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    if size == "bundled":
        return folder
    (folder / "config.json").write_text(json.dumps(config(size), indent=1))
    images = json.loads((BUNDLED / "preprocessor_config.json").read_text()) | IMAGES
    (folder / "preprocessor_config.json").write_text(json.dumps(images, indent=1))
    return folder


def config(size: str) -> dict:
    """Return config.json in the layout of transformers 5."""
    bundled = json.loads((BUNDLED / "config.json").read_text())
    hidden_size, intermediate_size, heads, kv_heads, vocab_size, tied = SIZES[size]
    text = {
        **{"model_type": "qwen2_vl_text", "hidden_size": hidden_size, "intermediate_size": intermediate_size},
        **{"num_hidden_layers": 28, "num_attention_heads": heads, "num_key_value_heads": kv_heads},
        **{"vocab_size": vocab_size, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
        **{name: bundled["text_config"][name] for name in ("bos_token_id", "eos_token_id")},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {"model_type": "qwen2_vl_vision", "hidden_size": hidden_size, **VISION}
    return bundled | {
        **{"dtype": "bfloat16", "tie_word_embeddings": tied},
        **{"text_config": text, "vision_config": vision},
    }
