"""Parses `quantization_config` of a checkpoint: which layers are quantized, and how."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from mmvllm.utils.arguments import check_int
from mmvllm.utils.patterns import Expression, Matching, PatternError
from mmvllm.utils.text import listed

# Modules around the same layer that versions of transformers name differently: "model.visual" was "visual".
_WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
MATCHING_SECONDS = 30.0  # of all expressions of a checkpoint, for all of its layers
_OUTSIDE = (".*visual.*", ".*lm_head")  # what AWQ and GPTQ leave alone, named or not


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How a weight (out, in) is quantized.

    Args:
        layout: tensor layout: AutoAWQ's, AutoGPTQ's, "packed" into int32 along the columns as in compressed-tensors, or
            "plain" for a quantized tensor of the weight's shape.
        dtype: type of the quantized values.
        block: rows and columns that share a scale; None means all rows or all columns.
        has_zeros: whether zero points are stored; without them zero is the middle of the range.
        zero_offset: added to a stored zero point; 1 in AutoGPTQ's first format.
        act_order: whether columns may be grouped in any order (act-order).
    """

    layout: Literal["awq", "gptq", "packed", "plain"]
    dtype: Literal["int4", "int8", "float8_e4m3fn"]
    block: tuple[int | None, int | None]
    has_zeros: bool = False
    zero_offset: int = 0
    act_order: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.dtype == "int4" else 8


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """Which layers of a checkpoint are quantized, and how.

    Args:
        method: `quant_method` of the config.
        layers: name patterns with their schemes; the first match counts.
        ignored: name patterns of layers that are not quantized.

    The constructor, `scheme_of` and `scheme_for` raise PatternError for a pattern that is invalid or takes too long.
    """

    method: str
    layers: tuple[tuple[str, WeightScheme], ...]
    ignored: tuple[str, ...] = ()
    _expressions: dict[str, Expression] = field(init=False, compare=False, repr=False)
    _matching: Matching = field(init=False, compare=False, repr=False)

    def __post_init__(self):
        patterns = (*self.ignored, *(pattern for pattern, _ in self.layers))
        object.__setattr__(self, "_matching", Matching(MATCHING_SECONDS))
        object.__setattr__(self, "_expressions", {pattern: self._matching.compiled(pattern) for pattern in patterns})

    def scheme_of(self, layer: str) -> WeightScheme | None:
        """The scheme of a linear layer, by its name in the checkpoint; None if it is not quantized.

        The prefixes "model." and "language_model." are optional in names.
        """
        names = _names(layer)
        if any(self._is_match(pattern, names) for pattern in self.ignored):
            return None
        return next((scheme for pattern, scheme in self.layers if self._is_match(pattern, names)), None)

    def _is_match(self, pattern: str, names: Iterable[str]) -> bool:
        return any(self._matching.is_match(self._expressions[pattern], name) for name in names)

    def scheme_for(self, layer: str) -> WeightScheme:
        """The scheme of a layer whose tensors are quantized; if the config gives none, the only scheme that there is.

        Lists of ignored layers are unreliable, because tools disagree on what a name matches.
        Raises ValueError if the config does not tell the scheme.
        """
        scheme = self.scheme_of(layer)
        if scheme is None and len(self.schemes) != 1:
            raise ValueError(f"{layer} is quantized, but quantization_config does not say how")
        return scheme or next(iter(self.schemes))

    @property
    def schemes(self) -> frozenset[WeightScheme]:
        return frozenset(scheme for _, scheme in self.layers)

    def __str__(self) -> str:
        """ "awq (4-bit integers)"."""
        kinds = {f"{s.bits}-bit {'floats' if s.dtype.startswith('float') else 'integers'}" for s in self.schemes}
        return f"{self.method} ({', '.join(sorted(kinds))})"


def _names(layer: str) -> tuple[str, ...]:
    bare = layer
    while wrapper := next((w for w in _WRAPPERS if bare.startswith(w)), None):
        bare = bare.removeprefix(wrapper)
    return bare, *(wrapper + bare for wrapper in _WRAPPERS)


def parse_quantization(raw: dict) -> CheckpointQuantization:
    """`quantization_config` of a `config.json`.

    Raises ValueError for an unsupported method, or an unsupported variant of a method; the message says what is
    supported.
    """
    method = raw.get("quant_method", "unknown")
    if not isinstance(method, str) or method not in _PARSERS:
        raise ValueError(f"is quantized with {method!r}, which is not supported; supported: {listed(_PARSERS, 'and')}")
    try:
        return _PARSERS[method]({name: value for name, value in raw.items() if value is not None})
    except PatternError as error:
        raise ValueError(f"quantization_config of {method}: {error}") from None


def _awq(raw: dict) -> CheckpointQuantization:
    """AutoAWQ's awq/models/_config.py; a name in `modules_to_not_convert` matches all layers that contain it."""
    _require("awq", "version", str(raw.get("version", raw.get("checkpoint_format", "gemm"))).lower(), "gemm")
    _require("awq", "bits", raw.get("bits", raw.get("w_bit", 4)), 4)
    _require("awq", "zero_point", raw.get("zero_point", True), True)
    block = 1, _group_size(raw.get("group_size", raw.get("q_group_size", 128)))
    ignored = tuple(f".*{re.escape(name)}.*" for name in _names_of(raw, "modules_to_not_convert"))
    return CheckpointQuantization(
        "awq", ((".*", WeightScheme("awq", "int4", block, has_zeros=True)),), (*_OUTSIDE, *ignored)
    )


def _gptq(raw: dict) -> CheckpointQuantization:
    """AutoGPTQ's and GPTQModel's quantize_config.json.

    `dynamic` has regular expressions of layers: after "-:" those that are stored as usual.
    """
    version = raw.get("checkpoint_format", raw.get("format", "gptq"))
    _require("gptq", "checkpoint_format", version, "gptq", "gptq_v2")
    _require("gptq", "bits", raw.get("bits"), 4, 8)
    _require("gptq", "pack_dtype", raw.get("pack_dtype", "int32"), "int32")
    dynamic = raw.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(key.startswith("-:") for key in dynamic):
        raise ValueError("quantization_config of gptq has `dynamic` widths of layers, which are not supported")
    scheme = WeightScheme(
        layout="gptq",
        dtype="int4" if raw["bits"] == 4 else "int8",
        block=(1, _group_size(raw.get("group_size", -1))),
        has_zeros=True,
        zero_offset=1 if version == "gptq" else 0,
        act_order=bool(raw.get("desc_act")),
    )
    ignored = tuple(f"(?:{key.removeprefix('-:')}).*" for key in dynamic)
    outside = _OUTSIDE[:1] if raw.get("lm_head") else _OUTSIDE
    return CheckpointQuantization("gptq", ((".*", scheme),), (*outside, *ignored))


def _fp8(raw: dict) -> CheckpointQuantization:
    """transformers' FineGrainedFP8Config and vLLM's Fp8Config; a name matches all modules inside it.

    Activations are never rounded with stored scales, so that it does not matter whether there are any.
    """
    _require("fp8", "fmt", raw.get("fmt", "e4m3"), "e4m3")
    _require("fp8", "activation_scheme", raw.get("activation_scheme", "dynamic"), "dynamic", "static")
    block = _block("weight_block_size", raw["weight_block_size"]) if "weight_block_size" in raw else (None, None)
    names = (*_names_of(raw, "modules_to_not_convert"), *_names_of(raw, "ignored_layers"))
    ignored = tuple(rf"(?:.*\.)?(?:{name})(?:\..*)?" for name in names)
    return CheckpointQuantization("fp8", ((".*", WeightScheme("plain", "float8_e4m3fn", block)),), ignored)


def _compressed_tensors(raw: dict) -> CheckpointQuantization:
    """compressed-tensors' quantization/quant_config.py and utils/match.py: names, "re:" patterns and classes."""
    sparsity = _object("sparsity_config", raw.get("sparsity_config") or {})
    _require("compressed-tensors", "sparsity_config's format", sparsity.get("format", "dense"), "dense")
    if _object("transform_config", raw.get("transform_config") or {}).get("config_groups"):
        raise ValueError("quantization_config of compressed-tensors has transforms, which are not supported")
    groups = _object("config_groups", raw.get("config_groups", {}))
    ranked = []
    for name, group in groups.items():
        scheme = _group_scheme(raw.get("format"), _object(f"config_groups's {name}", group))
        ranked += [(*_target(target), scheme) for target in _names_of(group, "targets")]
    if not ranked:
        raise ValueError("quantization_config of compressed-tensors quantizes no layers: config_groups has no targets")
    ranked.sort(key=lambda target: target[0])
    ignored = tuple(_target(name)[1] for name in _names_of(raw, "ignore"))
    return CheckpointQuantization("compressed-tensors", tuple(target[1:] for target in ranked), ignored)


def _target(text: str) -> tuple[int, str]:
    """How specific a target is, and its pattern; of all classes only linear layers are quantized."""
    if text.startswith("re:"):
        return 1, f"(?:{text.removeprefix('re:')}).*"
    return (2, ".*") if text == "Linear" else (0, re.escape(text))


def _group_scheme(layout: str | None, group: dict) -> WeightScheme:
    method, weights = "compressed-tensors", _object("weights", group.get("weights") or {})
    layout = group.get("format") or layout
    formats = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    _require(method, "format", layout, *formats)
    kind, bits, symmetric = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("symmetric", True)
    _require(method, "weights' actorder", weights.get("actorder") or None, None, "weight", "static", "group", "dynamic")
    is_packed = layout == "pack-quantized"
    _require(method, f"weights of {layout}, (type, num_bits)", (kind, bits), *(
        [("int", 4), ("int", 8)] if is_packed else [("int", 8), ("float", 8)]
    ))  # fmt: skip
    if kind == "float":
        _require(method, "symmetric of float weights", symmetric, True)
    return WeightScheme(
        layout="packed" if is_packed else "plain",
        dtype="float8_e4m3fn" if kind == "float" else "int4" if bits == 4 else "int8",
        block=_strategy_block(weights),
        has_zeros=not symmetric,
        act_order=weights.get("actorder") in ("group", "dynamic"),
    )


def _strategy_block(weights: dict) -> tuple[int | None, int | None]:
    size = weights.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or default
    _require("compressed-tensors", "weights' strategy", strategy, "tensor", "channel", "group", "block")
    if strategy == "block":
        structure = weights.get("block_structure")
        return _block("block_structure", structure.split("x") if isinstance(structure, str) else structure)
    return {"tensor": (None, None), "channel": (1, None)}.get(strategy) or (1, _group_size(size))


def _require(method: str, name: str, value: Any, *supported: Any) -> None:
    if value not in supported:
        raise ValueError(
            f"quantization_config of {method} has {name} {value!r}, which is not supported; "
            f"supported: {listed(supported, 'and')}"
        )


def _group_size(size: Any) -> int | None:
    if size == -1:
        return None
    check_int("quantization_config's group_size", size)
    return size


def _block(name: str, block: Any) -> tuple[int, int]:
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise ValueError(f"quantization_config's {name} must be two integers, got {block!r:.50}")
    rows, columns = (int(size) if isinstance(size, str) and size.isdecimal() else size for size in block)
    for size in (rows, columns):
        check_int(f"each item of quantization_config's {name}", size)
    return rows, columns


def _names_of(raw: dict, name: str) -> tuple[str, ...]:
    names = raw.get(name) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(item, str) for item in names):
        raise ValueError(f"quantization_config's {name} must be a list of names, got {names!r:.50}")
    return tuple(names)


def _object(name: str, value: Any) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"quantization_config's {name} must be a JSON object, got {value!r:.50}")
    return value


_PARSERS: dict[str, Callable[[dict], CheckpointQuantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
}
