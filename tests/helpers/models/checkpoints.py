"""Small random checkpoints of every family, saved through transformers' own classes."""

import json
import shutil
from pathlib import Path

import torch
import transformers

from mmvllm.models.folder import BUNDLED
from tests.helpers.models.shapes import SHAPES

SPECIAL = json.loads((BUNDLED / "config.json").read_text())
# Of small images, with the patches, means and deviations of the published settings.
PATCH_14 = {"min_pixels": 56 * 56, "max_pixels": 140 * 140, "patch_size": 14, "merge_size": 2}
PATCH_16 = {
    "size": {"shortest_edge": 64 * 64, "longest_edge": 160 * 160},
    "patch_size": 16,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# Bounds of all frames together; the other families' bounds of an image apply to a frame.
VIDEO_16 = {**PATCH_16, "size": {"shortest_edge": 4 * 64 * 64, "longest_edge": 12 * 96 * 96}}
# Family -> transformers' class of the model, and preprocessor_config.json in the layout of its published checkpoints.
FAMILIES = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", PATCH_14),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", PATCH_14),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", PATCH_16),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", PATCH_16),
    "qwen2": ("Qwen2ForCausalLM", None),
    "qwen3": ("Qwen3ForCausalLM", None),
}


def make_checkpoint(folder: Path, name: str) -> Path:
    """Save a random checkpoint of a named shape with the bundled tokenizer."""
    torch.manual_seed(sum(map(ord, name)))
    architecture, image_settings = FAMILIES[SHAPES[name]["family"]]
    model_class = getattr(transformers, architecture)
    model = model_class(_config(model_class.config_class, SHAPES[name]))
    for parameter_name, parameter in model.named_parameters():
        # Wide enough for logits to differ, so that completions do not repeat one token.
        spread = 0.3 if ".experts." in parameter_name else 0.15
        is_scale = "norm" in parameter_name or ".ln_q." in parameter_name
        parameter.data.normal_(1.0 if is_scale and parameter_name.endswith("weight") else 0.0, spread)
    model.generation_config.eos_token_id = SPECIAL["text_config"]["eos_token_id"]
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED / file, folder / file)
    if image_settings:
        settings = {**image_settings, "image_processor_type": "Qwen2VLImageProcessor"}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if image_settings is PATCH_16:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_16))
    return folder


def _config(config_class: type, shape: dict) -> transformers.PreTrainedConfig:
    text = _text_config(**shape["text"])
    if "vision" not in shape:
        return config_class(**text, tie_word_embeddings=shape["tied"])
    width = "hidden_size" if shape["family"] == "qwen2_vl" else "out_hidden_size"
    return config_class(
        text_config=text,
        vision_config={**shape["vision"], width: text["hidden_size"]},
        tie_word_embeddings=shape["tied"],
        **{key: SPECIAL[key] for key in SPECIAL if key.endswith("_token_id")},
    )


def _text_config(heads: int, kv_heads: int, layers: int, section: list[int] | None = None, **others) -> dict:
    """Values of a decoder in transformers' names; `others` replace the defaults."""
    width = others.get("hidden_size", 16 * heads)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "vocab_size": 768,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope | ({"mrope_section": section} if section else {}),
        "eos_token_id": SPECIAL["text_config"]["eos_token_id"],
        **others,
    }
