"""Which architectures there are, by the name in config.json."""

from mmvllm.models.qwen2_vl import Qwen2VL

MODELS = {"Qwen2VLForConditionalGeneration": Qwen2VL, "Qwen2ForCausalLM": Qwen2VL}


def model_class(architecture: str) -> type[Qwen2VL]:
    """The class that runs a checkpoint; ValueError names what is supported."""
    if architecture not in MODELS:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}")
    return MODELS[architecture]
