"""Read LoRA adapters (arXiv 2106.09685) in the format of PEFT, and check them against a model.

Only `adapter_config.json` and `adapter_model.safetensors` are read, so no code of a folder runs. Options that would
change the model in a way that is not implemented are refused by name.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmvllm.layers.linear import Linear
from mmvllm.layers.lora import Region
from mmvllm.layers.sharding import CheckpointView
from mmvllm.layers.vocabulary import VocabularyHead
from mmvllm.models.interface import Model
from mmvllm.utils.patterns import Matching, PatternError
from mmvllm.utils.text import load_json, shown, some_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_NAME = 500  # characters of a tensor's name; matching takes time quadratic in the number of its parts
MAX_DIMENSIONS = 5  # of a tensor; the kernel of a 3-D convolution has 5
MAX_TENSORS = 20_000  # matching them takes seconds; adapters of the largest models have a few thousand
MAX_RANK = 4096
LARGEST = torch.finfo(torch.float32).max
MATCHING_SECONDS = 5.0  # for all patterns of an adapter
# Fields of PEFT's LoraConfig that must be empty or false, since each of them changes what an adapter computes.
_UNSUPPORTED = (
    *("use_dora", "modules_to_save", "target_parameters", "trainable_token_indices", "lora_bias", "fan_in_fan_out"),
    *("layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
    *("monteclora_config", "velora_config", "megatron_config"),
)
_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base model's weights
_TYPES = {"target_modules": str | list | None, "rank_pattern": dict | None, "alpha_pattern": dict | None}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class LoraPair(NamedTuple):
    """The low-rank update of one weight (out, in): scale * b a, with a (r, in) and b (out, r)."""

    a: Tensor
    b: Tensor
    scale: float

    def delta(self, target_view: CheckpointView, device: torch.device) -> Tensor:
        """Return the update of a rank's part of the weight, in float32."""
        rows, columns = target_view.index
        return (self.b[rows].to(device).float() @ self.a[:, columns].to(device).float()) * self.scale


Target = tuple[str, int | None]  # a parameter and its part, as in `Model.parameter_for`


def read_adapter(folder: str | Path) -> dict[str, LoraPair]:
    """Return an adapter's matrices by the names of the adapted modules; raise ValueError for an unsupported format.

    The tensors are on the meta device; `place_adapter` reads their values after checking that they fit the model.
    The file format is https://huggingface.co/docs/peft/developer_guides/checkpoint.
    """
    folder = Path(folder)
    config = _read_config(folder)
    tensors = _read_shapes(folder / WEIGHTS)
    names = sorted({name for name, _ in tensors})
    try:
        return _pairs(folder, config, names, tensors)
    except PatternError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None


def _pairs(
    folder: Path, config: Mapping[str, Any], names: list[str], tensors: Mapping[tuple[str, str], Tensor]
) -> dict[str, LoraPair]:
    matching = Matching(MATCHING_SECONDS)
    if lacking := [name for name in names for kind in "AB" if (name, kind) not in tensors]:
        raise ValueError(f"{folder / WEIGHTS} has only one of lora_A and lora_B for {some_of(lacking)}")
    if outside := sorted({*names} - {*_targeted(names, config.get("target_modules"), matching)}):
        raise ValueError(f"{folder / WEIGHTS} has tensors that target_modules does not name: {some_of(outside)}")
    ranks = _by_module(names, config.get("rank_pattern"), config.get("r", 8), matching)
    alphas = _by_module(names, config.get("alpha_pattern"), config.get("lora_alpha", 8), matching)
    use_rslora = bool(config.get("use_rslora"))
    return {
        name: _pair(folder, name, tensors[name, "A"], tensors[name, "B"], ranks[name], alphas[name], use_rslora)
        for name in names
    }


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is not a LoRA adapter: it has no {CONFIG}")
    try:
        config = load_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ValueError(f"{path} has the peft_type {shown(kind)}; only 'LORA' is supported")
    if found := [name for name in _UNSUPPORTED if config.get(name)]:
        given = ", ".join(f"{name} {config[name]!r:.100}" for name in found)
        remedy = "; merge the adapter into its model with PEFT's merge_and_unload first" * ("modules_to_save" in found)
        raise ValueError(f"{path} has {given}, which is not supported{remedy}")
    for name, kinds in _TYPES.items():
        if not isinstance(config.get(name), kinds):
            raise ValueError(f"{path} has {name} {config[name]!r:.100}, which PEFT does not write")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{path} has bias {shown(config['bias'])}; only 'none' is supported")
    if (initialization := config.get("init_lora_weights")) not in _INITIALIZATIONS:
        raise ValueError(
            f"{path} has init_lora_weights {initialization!r:.100}, which changed the base model's weights; "
            "convert the adapter with PEFT's path_initial_model_for_weight_conversion"
        )
    return config


def _read_shapes(path: Path) -> dict[tuple[str, str], Tensor]:
    """Return tensors on the meta device, by module and "A" or "B"."""
    if not path.is_file():
        is_pickled = (path.parent / "adapter_model.bin").exists()
        found = "adapter_model.bin is not read, because it is a pickle; save it as safetensors" if is_pickled else ""
        raise ValueError(f"{path.parent} has no {path.name}{found and f'; {found}'}")
    with _opened(path) as file:
        names = list(file.keys())
        if len(names) > MAX_TENSORS:
            raise ValueError(f"{path} must have at most {MAX_TENSORS:,} tensors, got {len(names):,}")
        parts = {name: file.get_slice(name) for name in names}
        shapes = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
    if (longest := max(map(len, shapes), default=0)) > MAX_NAME:
        raise ValueError(f"{path}: names of tensors must have at most {MAX_NAME} characters, got {longest}")
    if many := [name for name, (_, shape) in shapes.items() if len(shape) > MAX_DIMENSIONS]:
        raise ValueError(f"{path} has tensors of more than {MAX_DIMENSIONS} dimensions: {some_of(many)}")
    matches = {name: _TENSOR.fullmatch(name) for name in shapes}
    if unknown := [name for name, match in matches.items() if match is None or shapes[name][0] not in _DTYPES]:
        raise ValueError(f"{path} has tensors that do not belong to LoRA layers: {some_of(unknown)}")
    if not shapes:
        raise ValueError(f"{path} has no tensors")
    if flat := [name for name, (_, shape) in shapes.items() if len(shape) < 2]:
        raise ValueError(f"{path} has tensors of fewer than two dimensions: {some_of(flat)}")
    if empty := [name for name, (_, shape) in shapes.items() if not math.prod(shape)]:
        raise ValueError(f"{path} has tensors without values: {some_of(empty)}")
    return {
        # A convolution whose stride equals its kernel size is a matrix product, so the kernel is flattened.
        match.groups(): torch.empty(shape, dtype=_DTYPES[dtype], device="meta").flatten(1)
        for match, (dtype, shape) in zip(matches.values(), shapes.values(), strict=True)
    }


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; raise ValueError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _targeted(modules: list[str], targets: Any, matching: Matching) -> list[str]:
    """Return the modules that match target_modules."""
    if targets == "all-linear":
        return modules
    if isinstance(targets, str):
        expression = matching.compiled(targets)
        return [module for module in modules if matching.is_match(expression, module)]
    ends = {target for target in targets or () if isinstance(target, str)}
    return [module for module in modules if not ends.isdisjoint(_ends(module))]


def _ends(module: str) -> Iterator[str]:
    """Yield a module's name, and its suffix after each dot."""
    parts = module.split(".")
    return (".".join(parts[i:]) for i in range(len(parts)))


def _by_module(
    modules: list[str], patterns: Mapping[str, Any] | None, default: Any, matching: Matching
) -> dict[str, Any]:
    """Return for each module the value of the first pattern that matches the end of its name, as in PEFT."""
    expressions = [(matching.compiled(rf"(.*\.)?({pattern})"), value) for pattern, value in (patterns or {}).items()]
    return {
        module: next((value for expression, value in expressions if matching.is_match(expression, module)), default)
        for module in modules
    }


def _pair(folder: Path, module: str, a: Tensor, b: Tensor, rank: Any, alpha: Any, use_rslora: bool) -> LoraPair:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1 or not _is_finite(alpha):
        raise ValueError(
            f"{folder / CONFIG} has r {rank!r:.50} and lora_alpha {alpha!r:.50} for {module}; both must be numbers"
        )
    if rank > MAX_RANK:
        raise ValueError(f"{folder / CONFIG} has r {rank!r:.50} for {module}; at most {MAX_RANK} is read")
    if len(a) != rank or b.dim() != 2 or b.shape[1] != rank:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"{folder / WEIGHTS} has lora_A and lora_B of shapes {shapes} for {module}, whose r is {rank}")
    return LoraPair(a, b, alpha / (rank**0.5 if use_rslora else rank))


def _is_finite(number: Any) -> bool:
    """Return whether it is a number in the range of float32."""
    return isinstance(number, int | float) and abs(number) <= LARGEST


def place_adapter(
    folder: str | Path, pairs: Mapping[str, LoraPair], model: Model, regions: Mapping[Target, Region]
) -> dict[Target, LoraPair]:
    """Read the values of the matrices and return them by the weights that they update; `regions`: `linear_regions`.

    Raises ValueError if the adapter is not for this model, or has NaN or infinity.
    """
    targets = {name: model.parameter_for(f"{name}.weight") for name in pairs}
    if unsupported := [name for name, target in targets.items() if target not in regions]:
        raise ValueError(
            f"{folder} adapts {some_of(unsupported)}; supported are the linear layers of the decoder's attention and "
            "MLPs, of the ViT and its mergers: no embedding, head, router or experts, and no layer that the model lacks"
        )
    if len({*targets.values()}) < len(targets):
        raise ValueError(f"{folder} adapts a layer twice, under names of two versions of transformers")
    for name, target in targets.items():
        pair, whole = pairs[name], tuple(shard.whole for shard in regions[target])
        if (len(pair.b), pair.a.shape[1]) != whole:
            raise ValueError(
                f"{folder} is for another model: {name} has {len(pair.b)} outputs and {pair.a.shape[1]} inputs in the "
                f"adapter, {whole[0]} and {whole[1]} in the model"
            )
    values = _read_values(Path(folder) / WEIGHTS, pairs)
    return {targets[name]: pair._replace(a=values[name, "A"], b=values[name, "B"]) for name, pair in pairs.items()}


def _read_values(path: Path, modules: Iterable[str]) -> dict[tuple[str, str], Tensor]:
    """Return tensors by module and "A" or "B"; raise ValueError for NaN or infinity."""
    with _opened(path) as file:
        names = {(module, kind): f"base_model.model.{module}.lora_{kind}.weight" for module in modules for kind in "AB"}
        values = {key: file.get_tensor(name).flatten(1) for key, name in names.items()}
    if not_finite := [names[key] for key, tensor in values.items() if not tensor.isfinite().all()]:
        raise ValueError(f"{path} has NaN or infinity in {some_of(not_finite)}")
    return values


def linear_regions(model: Model) -> dict[Target, Region]:
    """Return the weights that an adapter may change, with this rank's region; call it before weights are processed."""
    regions = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Linear) and not isinstance(module, VocabularyHead):
            for target_view in module.checkpoint_views():
                if target_view.parameter == "weight":
                    regions[f"{prefix}.weight", target_view.part] = target_view.region
    return regions
