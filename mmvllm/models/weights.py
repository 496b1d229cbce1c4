"""Load a checkpoint's safetensors through memory maps, or random weights; a rank reads only its part of each tensor."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import inf, prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm.auto import tqdm

from mmvllm.config import ModelConfig
from mmvllm.errors import first_line
from mmvllm.layers.attention import AttentionBackend, TorchAttention
from mmvllm.layers.linear import AssembledModule, LinearMethodModule
from mmvllm.layers.sharding import CheckpointView, Shard
from mmvllm.models.folder import weight_files
from mmvllm.models.interface import Model
from mmvllm.models.lora import LoraPair, Target, linear_regions, place_adapter, read_adapter
from mmvllm.models.registry import family_of
from mmvllm.processes.ranks import SINGLE, Ranks
from mmvllm.quantization.checkpoint_formats import FLOATS, StoredQuantizedTensor, StoredTensor
from mmvllm.quantization.checkpoint_tensors import adds_nothing, assembled
from mmvllm.quantization.quantized_tensor import QuantizedPartView, QuantizedTensor
from mmvllm.utils.memory_limit import return_freed_memory
from mmvllm.utils.text import beginning_of, printable, shown, some_of

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
    ranks: Ranks = SINGLE,
    lora: str | Path | None = None,
    prepare: Callable[[Model], None] = lambda model: None,
) -> Model:
    """Build the model on `device` in `dtype` with the folder's weights, or with random ones for "dummy".

    Each rank builds and reads only its part. A module is allocated when its first tensor is read, and it processes its
    weights after the last, so there are never two copies of the model in memory. `prepare` is called with the model
    before it has values; tensors that it adds to modules are not loaded. The adapter in the folder `lora` is merged
    into the weights. Raises ValueError for damaged weights, for tensors that do not match the config (with their
    names), for an adapter of another model, and for a number of ranks that the model cannot be split over.
    """
    try:
        with torch.device("meta"):
            model = family_of(config.architecture).build(config, attention, vision_attention, ranks).to(dtype)
    except (RuntimeError, TypeError) as error:  # raised by torch for sizes that do not fit into 64 bits
        raise ValueError(f"{folder / 'config.json'} has sizes that no model has: {first_line(error)}") from error
    model.eval().requires_grad_(False)
    pairs = {} if lora is None else place_adapter(lora, read_adapter(lora), model, linear_regions(model))
    prepare(model)
    _check_merges(model, pairs)
    if load_format == "dummy":
        _fill_randomly(CheckpointViews(model, device), seed, pairs)
    else:
        files = weight_files(folder)
        most_values = 8 * sum(path.stat().st_size for path in files)  # no format stores a value in less than one bit
        _fill(CheckpointViews(model, device, most_values), files, folder, pairs, progress=ranks.rank == 0)
    model.tie_head()
    return model


class CheckpointViews:
    """Maps a checkpoint's tensors to views of the model's parameters; modules are allocated and processed as they fill.

    Args:
        most_values: maximum number of values of one module; a larger one raises ValueError before it takes memory.
    """

    def __init__(self, model: Model, device: torch.device, most_values: float = inf):
        self.model, self.device, self._most_values = model, device, most_values
        self._views: dict[Target, CheckpointView] = {}
        self._missing: dict[str, set[Target]] = {}  # by module
        self._targets: dict[str, list[Target]] = {}
        self._allocated: set[str] = set()
        for module, views in _views_by_module(model):
            self._targets[module] = [(view.parameter, view.part) for view in views]
            self._missing[module] = set(self._targets[module])
            self._views |= {(view.parameter, view.part): view for view in views}
            if not views:
                self._allocate(module)

    def __iter__(self) -> Iterator[Target]:
        for targets in self._targets.values():
            yield from targets

    def __getitem__(self, target: Target) -> CheckpointView:
        """Return the view on the device; allocate its module if necessary."""
        module = target[0].rpartition(".")[0]
        if module not in self._allocated:
            self._allocate(module)
        return self._views[target]

    def planned(self, target: Target) -> CheckpointView:
        """Return the view, whose shapes are known, without allocating its module."""
        return self._views[target]

    def get(self, target: Target) -> CheckpointView | None:
        return self[target] if target in self._views else None

    def filled(self, target: Target) -> None:
        """Mark a view as filled; the caller must not keep the view, or its memory is not freed."""
        name = target[0].rpartition(".")[0]
        self._missing[name].discard(target)
        module = self.model.get_submodule(name)
        if isinstance(module, LinearMethodModule) and not self._missing[name]:
            for own in self._targets[name]:
                del self._views[own]
            module.process_weights_after_loading()
            return_freed_memory()

    def _allocate(self, name: str) -> None:
        self._allocated.add(name)
        module = self.model.get_submodule(name)
        num_values = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if num_values > self._most_values and self.device.type != "meta":  # meta tensors take no memory
            found = f"config.json says that {name} has {num_values:,} values"
            raise ValueError(f"{found}, more than the files of weights can have; download both again")
        module = module.to_empty(device=self.device, recurse=False)
        views = list(_views_of(name, module))
        self._views |= {(view.parameter, view.part): view for view in views}
        covered = Counter()
        for view in views:
            covered[view.parameter] += view.view.numel()
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            if covered[parameter_name] < parameter.numel():  # the rest is padding
                parameter.zero_()


def _tensors(files: list[Path], progress: bool) -> Iterator[tuple[str, StoredTensor]]:
    """Yield names and tensors, one at a time."""
    is_silent = True if len(files) == 1 or not progress else None
    for path in tqdm(files, desc="weights", unit="file", disable=is_silent):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    stored = file.get_slice(name)
                    dtype = stored.get_dtype()
                    if dtype == "F4" or dtype.startswith("F6_"):  # safetensors cannot slice these
                        raise ValueError(f"{path}: {name} has floats of 4 or 6 bits ({dtype}), which are not supported")
                    yield name, stored
        except (SafetensorError, OSError) as error:
            reason = beginning_of(printable(str(error)), 500)
            raise ValueError(f"{path} is damaged: {reason}; download it again") from None


def _fill(
    views: CheckpointViews, files: list[Path], folder: Path, pairs: Mapping[Target, LoraPair], progress: bool
) -> None:
    model, missing, extra, misshapen, unreadable, infinite, tied = views.model, set(views), [], [], [], [], {}
    for name, stored in _assembled(files, model.config, progress):
        target = model.parameter_for(name)
        if target is None:
            continue
        is_tied = target[0] in model.tied
        if not is_tied and target not in missing:
            if model.config.quantization is None or not adds_nothing(name, stored):
                extra.append(name)
            continue
        missing.discard(target)
        own = (model.tied[target[0]], None) if is_tied else target
        part = _part(stored, views.planned(own))
        if part is None:
            misshapen.append(
                f"{name[:200]} is {shown(tuple(stored.get_shape()))}, needs {views.planned(own).whole_shape}"
            )
        elif isinstance(part, Tensor) and part.dtype not in FLOATS:
            unreadable.append(f"{name} is {str(part.dtype).removeprefix('torch.')}")
        elif is_tied:
            tied[name] = part.dequantized() if isinstance(part, QuantizedTensor) else part, views[own].view
        else:
            if not _copied(part, views[own], pairs.get(own), views.device):
                infinite.append(name)
            views.filled(own)
    problems = {
        "missing tensors": [model.checkpoint_name(*target) for target in views if target in missing],
        "tensors that belong to no parameter or come twice": extra,
        "tensors of the wrong shape": misshapen,
        "tensors that are not floats, as in a quantized checkpoint without its quantization_config": unreadable,
        "tensors with values that are NaN, infinite, or too large for the dtype": infinite,
        "tensors that differ from those they are tied to": [
            name for name, (part, own) in tied.items() if not torch.equal(part.to(own), own)
        ],
    }
    if any(problems.values()):
        found = (f"{what} ({len(names)}): {some_of(names)}" for what, names in problems.items() if names)
        raise ValueError(f"{folder} does not match its config.json: {'; '.join(found)}")


def _copied(
    part: Tensor | QuantizedTensor, target_view: CheckpointView, pair: LoraPair | None, device: torch.device
) -> bool:
    """Copy the region of a tensor to its view; return False if any value is not finite."""
    merged = _merged(part, target_view, pair, device)
    target_view.view.copy_(merged)
    values = merged.scales if isinstance(merged, QuantizedTensor) else target_view.view
    if values.is_meta or not values.numel():
        return True
    return all(bound.isfinite() for bound in torch.aminmax(values))  # aminmax propagates NaN


def _assembled(
    files: list[Path], config: ModelConfig, progress: bool
) -> Iterator[tuple[str, StoredTensor | StoredQuantizedTensor]]:
    """Yield one tensor for each weight; the tensors of a quantized weight are combined."""
    tensors = _tensors(files, progress)
    if config.quantization is None:
        return tensors
    return assembled(tensors, config.quantization, config.experts.num_experts if config.experts else 0)


def _merged(
    part: Tensor | QuantizedTensor, target_view: CheckpointView, pair: LoraPair | None, device: torch.device
) -> Tensor | QuantizedTensor:
    """Return the values of a view plus the adapter's update; they are rounded once, when they are copied."""
    if isinstance(target_view.view, QuantizedPartView):
        if not isinstance(part, QuantizedTensor):
            raise ValueError(f"{target_view.parameter} is not quantized, but quantization_config says that it is")
        return part.to(device)
    if isinstance(part, QuantizedTensor):
        part = part.to(device).dequantized()
    return part if pair is None else part.to(device).float() + pair.delta(target_view, device)


def _check_merges(model: Model, pairs: Mapping[Target, LoraPair]) -> None:
    for target_view in checkpoint_views(model):
        if (target_view.parameter, target_view.part) in pairs and isinstance(target_view.view, QuantizedPartView):
            raise ValueError(
                "lora: an adapter cannot be merged into quantized weights, which stay as they are stored; "
                "give dtype='float32', or enable_lora=True and the adapter with each request"
            )


def checkpoint_views(model: nn.Module) -> Iterator[CheckpointView]:
    """Yield a view for every tensor that a checkpoint has for the model."""
    for _, views in _views_by_module(model):
        yield from views


def _views_by_module(model: nn.Module) -> Iterator[tuple[str, list[CheckpointView]]]:
    """Yield names and checkpoint views of all modules that own parameters."""
    for name, module in model.named_modules():
        if isinstance(module, AssembledModule) or any(True for _ in module.parameters(recurse=False)):
            yield name, list(_views_of(name, module))


def _views_of(name: str, module: nn.Module) -> Iterator[CheckpointView]:
    if isinstance(module, AssembledModule):
        for target_view in module.checkpoint_views():
            yield target_view._replace(parameter=f"{name}.{target_view.parameter}")
    else:
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            yield CheckpointView(parameter_name, None, parameter.data, tuple(map(Shard.of, parameter.shape)))


def _part(stored: StoredTensor, target_view: CheckpointView) -> Tensor | None:
    """Return the region of a tensor in the shape of its parameter, or None if the tensor does not fit.

    A convolution kernel (embed_dim, channels, frames, height, width), which all ranks have, becomes the matrix
    (embed_dim, patch_dim). Weights of experts are published as (E, in, out) and saved by transformers as (E, out, in);
    square ones are assumed to be the latter.
    """
    shape, whole, index = tuple(stored.get_shape()), target_view.whole_shape, target_view.index
    if shape == whole:
        return stored[index]
    if len(shape) == 5 and (shape[0], prod(shape[1:])) == whole:
        return stored[:,].flatten(1)
    if len(shape) == 3 and (shape[0], shape[2], shape[1]) == whole:
        return stored[index[0], index[2], index[1]].mT
    return None


def _fill_randomly(views: CheckpointViews, seed: int, pairs: Mapping[Target, LoraPair]) -> None:
    """Fill the model with random weights, one tensor at a time; ranks take their parts of the same whole tensors."""
    logger.info("random weights (load_format='dummy'): the text will make no sense")
    generator = torch.Generator(views.device).manual_seed(seed % 2**64)
    for target in views:
        _fill_one_randomly(views, target, generator, pairs)
        views.filled(target)


def _fill_one_randomly(
    views: CheckpointViews, target: Target, generator: torch.Generator, pairs: Mapping[Target, LoraPair]
) -> None:
    target_view = views[target]
    view = target_view.view
    if view.dim() > 1:
        whole = torch.empty(target_view.whole_shape, dtype=view.dtype, device=views.device)
        part = whole.normal_(0.0, 0.02, generator=generator)[target_view.index]
        view.copy_(_merged(part, target_view, pairs.get(target), views.device))
    else:
        view.fill_(0.0 if target_view.parameter.endswith("bias") else 1.0)
