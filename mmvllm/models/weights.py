"""Checkpoint folder -> model: safetensors through memory maps, or random weights."""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm.auto import tqdm

from mmvllm.config import ModelConfig
from mmvllm.layers.attention import AttentionBackend, TorchAttention
from mmvllm.layers.fp8 import Fp8View
from mmvllm.layers.linear import AssembledModule
from mmvllm.models.folder import check_not_quantized, weight_files
from mmvllm.models.interface import Model
from mmvllm.models.registry import family_of
from mmvllm.ranks import SINGLE, Ranks

logger = logging.getLogger(__name__)


def load_model(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
    attention: type[AttentionBackend] = TorchAttention,
    vision_attention: type[AttentionBackend] | None = None,
    fp8: bool = False,
    ranks: Ranks = SINGLE,
) -> Model:
    """Build the model on `device` in `dtype` with the folder's weights, or with random ones for "dummy".

    With `fp8`, the decoder's weights are rounded to 8 bits as they are read; they are never there in `dtype`.
    Raises ValueError for quantized or damaged weights, and for tensors that do not match the config, which it names.
    """
    if load_format != "dummy":
        check_not_quantized(folder, config.quantization)
    with torch.device("meta"):
        model = family_of(config.architecture).build(config, attention, vision_attention).to(dtype)
        if fp8:
            model.use_fp8()
    files = [] if load_format == "dummy" else weight_files(folder)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    _clear_padding(model)
    if load_format == "dummy":
        _fill_randomly(model, seed)
    else:
        _fill(model, files, folder)
    model.tie_head()
    return model


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
    missing = {(name, part): view for name, part, view in checkpoint_views(model)}
    extra, misshapen, tied = [], [], {}
    for name, tensor in _tensors(files):
        target = model.parameter_for(name)
        if target is None:
            continue
        destination = missing.pop(target, None)
        if target[0] in model.tied:
            tied[name] = tensor, model.get_parameter(model.tied[target[0]])
        elif destination is None:
            extra.append(name)
        elif (fitting := _fitting(tensor, destination.shape)) is not None:
            destination.copy_(fitting)
        else:
            misshapen.append(f"{name} is {tuple(tensor.shape)}, needs {tuple(destination.shape)}")
    unequal = [name for name, (tensor, parameter) in tied.items() if not torch.equal(tensor.to(parameter), parameter)]
    problems = {
        "missing tensors": [model.checkpoint_name(*target) for target in missing],
        "tensors that belong to no parameter or come twice": extra,
        "tensors of the wrong shape": misshapen,
        "tensors that differ from those they are tied to": unequal,
    }
    if any(problems.values()):
        found = (_listed(what, names) for what, names in problems.items() if names)
        raise ValueError(f"{folder} does not match its config.json: {'; '.join(found)}")


def _listed(what: str, names: list[str]) -> str:
    return f"{what} ({len(names)}): {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def checkpoint_views(model: nn.Module) -> Iterator[tuple[str, int | None, Tensor | Fp8View]]:
    """(parameter, part, view) of every tensor that a checkpoint has for the model: where it is copied to."""
    for prefix, module in model.named_modules():
        if isinstance(module, AssembledModule):
            for name, part, view in module.checkpoint_views():
                yield f"{prefix}.{name}", part, view
        else:
            for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
                yield name, None, parameter.data


def _clear_padding(model: nn.Module) -> None:
    """Fill with zeros the parameters that have values which no tensor of a checkpoint is copied to, and all scales."""
    covered = Counter()
    for name, _, view in checkpoint_views(model):
        covered[name] += view.numel()
    for name, parameter in model.named_parameters():
        if covered[name] < parameter.numel():
            parameter.data.zero_()
    for scale in model.buffers():
        scale.zero_()


def _fitting(tensor: Tensor, shape: torch.Size) -> Tensor | None:
    """The tensor in the shape of its parameter; None if it does not fit.

    A convolution kernel (embed_dim, channels, frames, height, width) is the matrix (embed_dim, patch_dim). Weights of
    experts are published as (E, in, out) and saved by transformers as (E, out, in); square ones are taken for the
    latter.
    """
    forms = [tensor]
    if tensor.dim() == 5:
        forms.append(tensor.flatten(1))
    if tensor.dim() == 3:
        forms.append(tensor.mT)
    return next((form for form in forms if form.shape == shape), None)


def _fill_randomly(model: nn.Module, seed: int) -> None:
    logger.info("random weights (load_format='dummy'): the text will make no sense")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed % 2**64)
    for name, _, view in checkpoint_views(model):
        if view.dim() > 1:
            view.normal_(0.0, 0.02, generator=generator)
        else:
            view.fill_(0.0 if name.endswith("bias") else 1.0)
