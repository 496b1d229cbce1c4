"""Compare a parsed config with the one of transformers."""

from dataclasses import fields

from transformers import AutoConfig

from mmvllm.config import ModelConfig
from mmvllm.models.registry import load_config

DECODER = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")


def assert_equals_transformers(folder) -> ModelConfig:
    """Compare every value that both configs have."""
    got, want = load_config(folder), AutoConfig.from_pretrained(folder)
    text = want.get_text_config()
    for name in set(DECODER) - {"eos_token_id", "hidden_act"}:
        assert getattr(got, name) == getattr(text, name), name
    assert got.architecture == want.architectures[0]
    assert got.head_dim == (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    assert got.rope_theta == text.rope_parameters["rope_theta"]
    assert (got.mrope_section and list(got.mrope_section)) == text.rope_parameters.get("mrope_section")
    assert got.tie_word_embeddings == want.tie_word_embeddings
    assert got.dtype == want.dtype
    assert got.image_token_id == getattr(want, "image_token_id", None)
    assert (got.vision is None) == (getattr(want, "vision_config", None) is None)
    for field in fields(got.vision) if got.vision else ():
        assert getattr(got.vision, field.name) == getattr(want.vision_config, field.name), field.name
    return got
