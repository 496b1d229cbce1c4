"""Compare a parsed config with the one of transformers."""

from dataclasses import asdict, fields

from transformers import AutoConfig, PreTrainedConfig

from mmvllm.config import ExpertsConfig, ModelConfig, VisionConfig
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
    assert got.dtype == (want.dtype or text.dtype)
    assert got.image_token_id == getattr(want, "image_token_id", None)
    assert_experts_equal_transformers(got.experts, text)
    assert (got.vision is None) == (getattr(want, "vision_config", None) is None)
    if got.vision:
        assert_vision_equals_transformers(got.vision, want.vision_config)
    return got


def assert_experts_equal_transformers(got: ExpertsConfig | None, text: PreTrainedConfig) -> None:
    if got is None:
        assert not getattr(text, "num_experts", None)
        return
    sizes = (text.num_experts, text.num_experts_per_tok, text.moe_intermediate_size)
    assert (got.num_experts, got.num_experts_per_tok, got.intermediate_size) == sizes
    layers, step = range(text.num_hidden_layers), text.decoder_sparse_step
    assert got.dense_layers == {i for i in layers if i in text.mlp_only_layers or (i + 1) % step}


def assert_vision_equals_transformers(got: VisionConfig, want: PreTrainedConfig) -> None:
    """Compare all fields; Qwen2-VL has other names for three sizes."""
    expected = {field.name: getattr(want, field.name, None) for field in fields(got)}
    if want.model_type.startswith("qwen2_vl"):
        expected["out_hidden_size"] = want.hidden_size
        expected["intermediate_size"] = int(want.mlp_ratio * want.embed_dim)
    else:
        expected["embed_dim"] = want.hidden_size
    for name in ("fullatt_block_indexes", "deepstack_visual_indexes"):
        if name in expected:
            expected[name] = type(getattr(got, name))(expected[name])
    assert asdict(got) == expected
