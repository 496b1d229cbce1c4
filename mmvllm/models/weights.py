"""Checkpoint folder -> model: safetensors through memory maps, random weights, or a clear refusal."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm.auto import tqdm

from mmvllm.config import ModelConfig
from mmvllm.layers.attention import AttentionBackend, TorchAttention
from mmvllm.layers.linear import MergedLinear
from mmvllm.models.interface import Model
from mmvllm.models.registry import family_of

logger = logging.getLogger(__name__)
BUNDLED = Path(__file__).parent.parent / "assets" / "demo"


def model_name(model: str | Path | None) -> str:
    """What to call a model, as the user named it."""
    return "bundled" if model is None else str(model)


def resolve_folder(model: str | Path | None, with_weights: bool = True) -> Path:
    """The folder of a checkpoint: the bundled one for None, a local folder, or a hub id, downloaded unless cached.

    Offline mode (HF_HUB_OFFLINE) is respected; pickled weights are never downloaded.
    """
    if model is None:
        return BUNDLED
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        if (folder := Path(model).expanduser()).is_dir():
            return folder
        wanted = ["*.json", "*.txt", "*.jinja", *(["*.safetensors"] if with_weights else [])]
        return Path(snapshot_download(str(model), allow_patterns=wanted))
    except HFValidationError:
        raise ValueError(
            f"model {str(model)!r} is neither a local folder nor a hub id like 'Qwen/Qwen2-VL-2B'"
        ) from None
    except (OSError, ValueError, RuntimeError) as error:  # the hub's own errors are OSErrors
        raise ValueError(
            f"model {str(model)!r} is not a local folder and cannot be downloaded from the hub: {error}"
        ) from error


def load_model(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
    attention: type[AttentionBackend] = TorchAttention,
) -> Model:
    """Build the model on `device` in `dtype` with the folder's weights, or with random ones for "dummy"."""
    if load_format != "dummy" and config.quantization:
        raise ValueError(
            f"{folder} is {config.quantization}-quantized, which is not supported; use the original weights"
        )
    with torch.device("meta"):
        model = family_of(config.architecture).build(config, attention).to(dtype)
    files = [] if load_format == "dummy" else _weight_files(folder)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    if load_format == "dummy":
        _fill_randomly(model, seed)
    else:
        _fill(model, files, folder)
    model.tie_head()
    return model


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = sorted({folder / name for name in _weight_map(index).values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise ValueError(
            f"{folder} has no *.safetensors weights (found: {found}); mmvllm loads no pickled weights. "
            "For random weights pass load_format='dummy'"
        )
    if missing := [path.name for path in files if not path.is_file()]:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which {index.name} names; download it again")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{index} is damaged: {error!r}; download it again") from None


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, one at a time, each a view of a memory map."""
    for path in tqdm(files, desc="weights", unit="file", disable=True if len(files) == 1 else None):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}; download it again") from None


def _fill(model: Model, files: list[Path], folder: Path) -> None:
    missing = dict(_destinations(model))
    extra, misshapen = [], []
    for name, tensor in _tensors(files):
        target = model.parameter_for(name)
        if target is None:
            continue
        destination = missing.pop(target, None)
        if destination is None:
            extra.append(name)
        elif destination.shape == tensor.shape or _is_patch_embedding(destination, tensor):
            destination.copy_(tensor.reshape(destination.shape))
        else:
            misshapen.append(f"{name} is {tuple(tensor.shape)}, needs {tuple(destination.shape)}")
    problems = [
        f"{what} ({len(names)}): {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for what, names in (
            ("missing tensors", [model.checkpoint_name(*target) for target in missing]),
            ("tensors that belong to no parameter or come twice", extra),
            ("tensors of the wrong shape", misshapen),
        )
        if names
    ]
    if problems:
        raise ValueError(f"{folder} does not match its config.json: {'; '.join(problems)}")


def _destinations(model: nn.Module) -> Iterator[tuple[tuple[str, int | None], Tensor]]:
    """Every place a checkpoint tensor may go: whole parameters, and the rows of merged ones."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            if isinstance(module, MergedLinear):
                for part, rows in enumerate(module.rows):
                    yield (name, part), parameter.data[rows]
            else:
                yield (name, None), parameter.data


def _is_patch_embedding(destination: Tensor, tensor: Tensor) -> bool:
    """A convolution kernel (E, channels, frames, height, width), which we keep as the matrix (E, patch_dim)."""
    return tensor.dim() == 5 and destination.shape == tensor.flatten(1).shape


def _fill_randomly(model: nn.Module, seed: int) -> None:
    logger.info("random weights (load_format='dummy'): the text will make no sense")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed % 2**64)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
