"""Which model families there are, by the architecture in config.json."""

from pathlib import Path

from mmvllm.config import ModelConfig
from mmvllm.models import qwen2_vl
from mmvllm.models.hf_config import read_json
from mmvllm.models.interface import ModelFamily
from mmvllm.processors.image import ImageProcessorConfig

FAMILIES: dict[str, ModelFamily] = {
    name: module.FAMILY for module in (qwen2_vl,) for name in module.FAMILY.architectures
}


def family_of(architecture: str) -> ModelFamily:
    """The family that serves an architecture; ValueError names what is supported."""
    if architecture not in FAMILIES:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def load_image_config(folder: str | Path) -> ImageProcessorConfig:
    """How images are prepared for a checkpoint; raises ValueError for damaged or unsupported settings."""
    return family_of(load_config(folder).architecture).image_config(Path(folder))


def load_config(folder: str | Path) -> ModelConfig:
    """Read `config.json` and `generation_config.json` of a checkpoint folder.

    Raises ValueError for a folder or a config that cannot be served.
    """
    path = Path(folder) / "config.json"
    raw = read_json(path)
    if raw is None:
        raise ValueError(f"{folder}: not a checkpoint folder, it has no config.json")
    generation = read_json(Path(folder) / "generation_config.json") or {}
    architecture = (raw.get("architectures") or [raw.get("model_type", "unknown")])[0]
    try:
        return family_of(architecture).parse_config(architecture, raw, generation)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
