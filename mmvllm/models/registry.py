"""The model families by the architecture in config.json; a family is imported when it is first needed."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mmvllm.config import ModelConfig
from mmvllm.models.hf_config import read_json
from mmvllm.utils.text import beginning_of, printable

if TYPE_CHECKING:  # these import torch, and refusing a checkpoint must be fast
    from mmvllm.models.interface import ModelFamily
    from mmvllm.processors.images.processor import ImageProcessorConfig
    from mmvllm.processors.videos.processor import VideoProcessorConfig

# Architecture -> the package whose FAMILY serves it.
FAMILIES = {
    "Qwen2VLForConditionalGeneration": "mmvllm.models.qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "mmvllm.models.qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "mmvllm.models.qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "mmvllm.models.qwen3_vl",
    "Qwen2ForCausalLM": "mmvllm.models.qwen2_vl",
    "Qwen3ForCausalLM": "mmvllm.models.qwen3_vl",
}


def family_of(architecture: str) -> "ModelFamily":
    """Return the family that serves an architecture; raise ValueError, which lists the supported ones, if none does."""
    _check_architecture(architecture)
    return import_module(FAMILIES[architecture]).FAMILY


def load_image_config(folder: str | Path) -> "ImageProcessorConfig":
    """Return how images are prepared for a checkpoint; raise ValueError like `load_media_configs`."""
    return load_media_configs(folder)[0]


def load_media_configs(folder: str | Path) -> tuple["ImageProcessorConfig", "VideoProcessorConfig"]:
    """Return how images and videos are prepared for a checkpoint.

    Raises ValueError for settings that are damaged or not supported, or that do not match the model.
    """
    config = load_config(folder)
    family = family_of(config.architecture)
    configs = {"image": family.image_config(Path(folder)), "video": family.video_config(Path(folder))}
    if vision := config.vision:
        if not 0 <= config.image_token_id < config.vocab_size:
            raise ValueError(
                f"{folder}: image_token_id must be a token id below vocab_size, {config.vocab_size}, "
                f"got {config.image_token_id}"
            )
        needed = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        for modality, settings in configs.items():
            cut = (settings.patch_size, settings.temporal_patch_size, settings.merge_size)
            if cut != needed:
                raise ValueError(
                    f"{folder}: the {modality} settings have (patch_size, temporal_patch_size, merge_size) {cut}, "
                    f"vision_config needs {needed}"
                )
    return configs["image"], configs["video"]


def load_config(folder: str | Path) -> ModelConfig:
    """Read `config.json` and `generation_config.json` of a checkpoint folder.

    Raises ValueError for a folder or a config that is not supported.
    """
    architecture, raw = read_config(folder)
    generation = read_json(Path(folder) / "generation_config.json") or {}
    try:
        return family_of(architecture).parse_config(architecture, raw, generation)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{Path(folder) / 'config.json'}: {beginning_of(printable(str(error)), 1000)}") from None


def read_config(folder: str | Path) -> tuple[str, dict]:
    """Return the architecture that `config.json` names, which is supported, and the whole JSON object.

    Raises ValueError if there is no such file, it is damaged, or its architecture is not supported.
    """
    path = Path(folder) / "config.json"
    raw = read_json(path)
    if raw is None:
        raise ValueError(f"{folder}: not a checkpoint folder, it has no config.json")
    names = raw.get("architectures") or [raw.get("model_type", "unknown")]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ValueError(f"{path}: architectures must be a list of names, got {names!r:.50}")
    try:
        _check_architecture(names[0])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return names[0], raw


def _check_architecture(architecture: str) -> None:
    if architecture not in FAMILIES:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}")
