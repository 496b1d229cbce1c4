"""What a checkpoint folder says about a model, and how this engine is to run it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from mmvllm.config import EngineConfig, ModelConfig
from mmvllm.inputs import MediaRules
from mmvllm.models.folder import resolve_folder
from mmvllm.models.registry import family_of, load_config, load_media_configs
from mmvllm.processors.images.processor import ImageProcessorConfig
from mmvllm.processors.videos.processor import VideoProcessorConfig


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All but the weights and the tokenizer.

    Args:
        config: with the limits of the device.
        device, dtype: of weights and KV cache; of rank 0, if there are several.
    """

    folder: Path
    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    model_config: ModelConfig
    image_config: ImageProcessorConfig
    video_config: VideoProcessorConfig

    @property
    def media_rules(self) -> MediaRules | None:
        return family_of(self.model_config.architecture).media_rules(self.model_config)


def read_checkpoint(model: str | Path | None, config: EngineConfig) -> Checkpoint:
    """Raises ValueError for what cannot be served."""
    device = config.resolve_device()
    folder = resolve_folder(model, with_weights=config.load_format != "dummy")
    model_config = load_config(folder)
    image_config, video_config = load_media_configs(folder)
    return Checkpoint(
        folder=folder,
        config=config.with_limits(device),
        device=device,
        dtype=config.resolve_dtype(model_config.dtype, device, model_config.quantization is not None),
        model_config=model_config,
        image_config=image_config,
        video_config=video_config,
    )
