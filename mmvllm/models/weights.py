"""Checkpoint folder -> model: safetensors through memory maps, or random weights; a rank reads its part of each."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm.auto import tqdm

from mmvllm.config import ModelConfig
from mmvllm.layers.attention import AttentionBackend, TorchAttention
from mmvllm.layers.linear import AssembledModule
from mmvllm.layers.sharding import CheckpointView, Shard
from mmvllm.models.folder import check_not_quantized, weight_files
from mmvllm.models.interface import Model
from mmvllm.models.lora import LoraPair, Target, linear_regions, place_adapter, read_adapter
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
    lora: str | Path | None = None,
) -> Model:
    """Build the model on `device` in `dtype` with the folder's weights, or with random ones for "dummy".

    Of several ranks, each builds and reads its own part only. With `fp8`, the decoder's weights are rounded to 8 bits
    as they are read; they are never there in `dtype`. What the adapter in the folder `lora` adds is merged before.
    Raises ValueError for quantized or damaged weights, for tensors that do not match the config, which it names, for an
    adapter that is not for this model, and for a number of ranks that the model cannot be split over.
    """
    if load_format != "dummy":
        check_not_quantized(folder, config.quantization)
    with torch.device("meta"):
        model = family_of(config.architecture).build(config, attention, vision_attention, ranks).to(dtype)
        if fp8:
            model.use_fp8()
    pairs = {} if lora is None else place_adapter(lora, read_adapter(lora), model, linear_regions(model))
    files = [] if load_format == "dummy" else weight_files(folder)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    _clear_padding(model)
    if load_format == "dummy":
        _fill_randomly(model, seed, pairs)
    else:
        _fill(model, files, folder, pairs, progress=ranks.rank == 0)
    model.tie_head()
    return model


class StoredTensor(Protocol):
    """A tensor of a file, not read yet; an index reads a part of it, as a view of the memory map where it can be."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


def _tensors(files: list[Path], progress: bool) -> Iterator[tuple[str, StoredTensor]]:
    """Name and tensor, one at a time."""
    is_silent = True if len(files) == 1 or not progress else None
    for path in tqdm(files, desc="weights", unit="file", disable=is_silent):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, file.get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}; download it again") from None


def _fill(model: Model, files: list[Path], folder: Path, pairs: Mapping[Target, LoraPair], progress: bool) -> None:
    places = {(place.parameter, place.part): place for place in checkpoint_views(model)}
    missing, extra, misshapen, tied = dict(places), [], [], {}
    device = next(model.parameters()).device
    for name, stored in _tensors(files, progress):
        target = model.parameter_for(name)
        if target is None:
            continue
        place = missing.pop(target, None)
        if target[0] in model.tied:
            place = places[model.tied[target[0]], None]
            tied[name] = _part(stored, place), place.view
        elif place is None:
            extra.append(name)
        elif (part := _part(stored, place)) is not None:
            place.view.copy_(_merged(part, place, pairs.get(target), device))
        else:
            misshapen.append(f"{name} is {tuple(stored.get_shape())}, needs {place.whole_shape}")
    unequal = [name for name, (part, own) in tied.items() if part is None or not torch.equal(part.to(own), own)]
    problems = {
        "missing tensors": [model.checkpoint_name(*target) for target in missing],
        "tensors that belong to no parameter or come twice": extra,
        "tensors of the wrong shape": misshapen,
        "tensors that differ from those they are tied to": unequal,
    }
    if any(problems.values()):
        found = (_listed(what, names) for what, names in problems.items() if names)
        raise ValueError(f"{folder} does not match its config.json: {'; '.join(found)}")


def _merged(part: Tensor, place: CheckpointView, pair: LoraPair | None, device: torch.device) -> Tensor:
    """The values of a view, with what an adapter adds to them; rounded once, when they are copied."""
    return part if pair is None else part.to(device).float() + pair.delta(place, device)


def _listed(what: str, names: list[str]) -> str:
    return f"{what} ({len(names)}): {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def checkpoint_views(model: nn.Module) -> Iterator[CheckpointView]:
    """Of every tensor that a checkpoint has for the model."""
    for prefix, module in model.named_modules():
        if isinstance(module, AssembledModule):
            for place in module.checkpoint_views():
                yield place._replace(parameter=f"{prefix}.{place.parameter}")
        else:
            for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
                yield CheckpointView(name, None, parameter.data, tuple(map(Shard.of, parameter.shape)))


def _clear_padding(model: nn.Module) -> None:
    """Fill with zeros the parameters that have values which no tensor of a checkpoint is copied to, and all scales."""
    covered = Counter()
    for place in checkpoint_views(model):
        covered[place.parameter] += place.view.numel()
    for name, parameter in model.named_parameters():
        if covered[name] < parameter.numel():
            parameter.data.zero_()
    for scale in model.buffers():
        scale.zero_()


def _part(stored: StoredTensor, place: CheckpointView) -> Tensor | None:
    """The region of a tensor, in the shape of its parameter; None if the tensor does not fit.

    A convolution kernel (embed_dim, channels, frames, height, width), which all ranks have, is the matrix (embed_dim,
    patch_dim). Weights of experts are published as (E, in, out) and saved by transformers as (E, out, in); square ones
    are taken for the latter.
    """
    shape, whole, index = tuple(stored.get_shape()), place.whole_shape, place.index
    if shape == whole:
        return stored[index]
    if len(shape) == 5 and (shape[0], prod(shape[1:])) == whole:
        return stored[:,].flatten(1)
    if len(shape) == 3 and (shape[0], shape[2], shape[1]) == whole:
        return stored[index[0], index[2], index[1]].mT
    return None


def _fill_randomly(model: Model, seed: int, pairs: Mapping[Target, LoraPair]) -> None:
    """With the values that the whole model would have, one tensor at a time."""
    logger.info("random weights (load_format='dummy'): the text will make no sense")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed % 2**64)
    for place in checkpoint_views(model):
        view = place.view
        if view.dim() > 1:
            whole = torch.empty(place.whole_shape, dtype=view.dtype, device=device)
            part = whole.normal_(0.0, 0.02, generator=generator)[place.index]
            view.copy_(_merged(part, place, pairs.get((place.parameter, place.part)), device))
        else:
            view.fill_(0.0 if place.parameter.endswith("bias") else 1.0)
