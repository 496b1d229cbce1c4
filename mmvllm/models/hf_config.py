"""Read Hugging Face configs: JSON files, and the fields that all decoders have."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmvllm.config import torch_dtype
from mmvllm.quantization.config import CheckpointQuantization, parse_quantization
from mmvllm.sampling_params import SamplingParams
from mmvllm.utils.arguments import check_int, is_number
from mmvllm.utils.text import load_json

if TYPE_CHECKING:
    import torch

# Fields of SamplingParams that generation_config.json has under the same names.
SAMPLING_NAMES = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)

# The ids of the Qwen-VL tokenizers, for configs that leave them out.
SPECIAL_TOKEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}

LARGEST_NUMBER = 1e38  # below the largest float32
LARGEST_VISION_SIZE = 2**31
ROPE_THETA = 10000.0  # for the rotary embedding of every family's ViT


def read_json(path: Path) -> dict | None:
    """Return a JSON object without nulls, which mean the same as leaving names out; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        return json_object("it", load_json(path))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; download it again") from None


def json_object(name: str, value: Any) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {value!r:.50}")
    return {key: item for key, item in value.items() if item is not None}


def text_config(raw: dict) -> dict:
    """Return the decoder's config: nested, as transformers 5 writes it, or flat, as originally published."""
    return {**raw, **json_object("text_config", raw.get("text_config", {}))}


def integers(name: str, value: Any) -> tuple[int, ...]:
    """Return a list of integers of at least 0 as a tuple; raise ValueError for anything else."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list of integers, got {value!r:.50}")
    for item in value:
        check_int(f"each item of {name}", item, at_least=0)
    return tuple(value)


def decoder_fields(raw: dict, generation: dict) -> dict[str, Any]:
    """Return the `ModelConfig` fields that all families read alike, in either layout and under either name.

    `rope_parameters` was `rope_scaling`, and `dtype` was `torch_dtype`. Raises ValueError for an unsupported decoder.
    """
    text = text_config(raw)
    rope = json_object("rope_parameters", text.get("rope_parameters") or text.get("rope_scaling") or {})
    rope.setdefault("rope_theta", text.get("rope_theta"))
    _check_decoder(text, rope)
    heads, hidden_size = text["num_attention_heads"], text["hidden_size"]
    return {
        "hidden_size": hidden_size,
        "intermediate_size": text["intermediate_size"],
        "num_hidden_layers": text["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": text.get("num_key_value_heads", heads),
        "head_dim": text.get("head_dim", hidden_size // heads),
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text.get("max_position_embeddings", 32768),
        "rms_norm_eps": float(text["rms_norm_eps"]),
        "rope_theta": float(rope["rope_theta"]),
        "mrope_section": integers("mrope_section", rope["mrope_section"]) if "mrope_section" in rope else None,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
        "dtype": _dtype(text.get("dtype") or text.get("torch_dtype") or "float32"),
        "eos_token_ids": _eos_token_ids(generation.get("eos_token_id", text.get("eos_token_id"))),
        "quantization": quantization_of(raw),
        "max_new_tokens": _max_new_tokens(generation),
        "sampling_defaults": _sampling_defaults(generation),
    }


def vision_fields(raw: dict, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `vision_config` that `defaults` names.

    Raises ValueError for a value that is not an integer where the default is one, and for another `rope_theta`.
    """
    vision = json_object("vision_config", raw.get("vision_config", {}))
    fields = {name: vision.get(name, default) for name, default in defaults.items()}
    for name, default in defaults.items():
        if isinstance(default, int):
            check_int(f"vision_config's {name}", fields[name])
            if fields[name] > LARGEST_VISION_SIZE:
                shown = f"{fields[name]!r:.50}"
                raise ValueError(f"vision_config's {name} must be at most {LARGEST_VISION_SIZE}, got {shown}")
    rope = json_object("rope_parameters", vision.get("rope_parameters", {}))
    for name, supported in (("rope_theta", ROPE_THETA), ("rope_type", "axial")):
        if rope.get(name, supported) != supported:
            raise ValueError(f"vision_config's {name} must be {supported!r}, got {rope[name]!r:.50}")
    return fields


def special_token_ids(raw: dict) -> dict[str, int]:
    """Return the ids of the special tokens for media; raise ValueError for a value that is not an id."""
    ids = {name: raw.get(name, default) for name, default in SPECIAL_TOKEN_IDS.items()}
    for name, token_id in ids.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"{name} must be a token id, got {token_id!r:.50}")
    return ids


def quantization_of(raw: dict) -> CheckpointQuantization | None:
    """Return how `config.json` says that weights are quantized; raise ValueError for an unsupported method."""
    given = text_config(raw)  # `compression_config` is the older name of compressed-tensors' config
    quantization = given.get("quantization_config") or given.get("compression_config") or {}
    quantization = json_object("quantization_config", quantization)
    return parse_quantization(quantization) if quantization else None


def _dtype(name: Any) -> "torch.dtype":
    if (dtype := torch_dtype(name)) is None:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {name!r:.50}")
    return dtype


def _max_new_tokens(generation: dict) -> int | None:
    if "max_new_tokens" in generation:
        check_int("generation_config.json's max_new_tokens", generation["max_new_tokens"])
    return generation.get("max_new_tokens")


def _sampling_defaults(generation: dict) -> tuple[tuple[str, float], ...]:
    """Return sampling defaults as in transformers: `do_sample` false is greedy; true has temperature 1 by default."""
    do_sample = generation.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise ValueError(f"generation_config.json's do_sample must be true or false, got {do_sample!r}")
    given = {name: generation[name] for name in SAMPLING_NAMES if name in generation}
    if do_sample:
        given = {"temperature": 1.0} | given
    try:
        params = SamplingParams(**given)
    except ValueError as error:
        raise ValueError(f"generation_config.json's {error}") from None
    values = {name: getattr(params, name) for name in given}
    if do_sample is False:
        values = values | {"temperature": 0.0}
    return tuple(values.items())


def _check_decoder(text: dict, rope: dict) -> None:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    given = {**text, "rope_theta": rope["rope_theta"]}
    # A wrong guess of rms_norm_eps or rope_theta would go unnoticed, because it only makes completions worse.
    if missing := [name for name in (*sizes, "rms_norm_eps", "rope_theta") if given.get(name) is None]:
        raise ValueError(f"does not give {', '.join(missing)}")
    for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        if name in text:
            check_int(name, text[name])
    for name, least in (("rms_norm_eps", 0), ("rope_theta", 1)):
        if not is_number(given[name]) or not least <= given[name] <= LARGEST_NUMBER or not given[name]:
            bound = f"of at least {least}" if least else "above 0"
            raise ValueError(f"{name} must be a number {bound}, at most {LARGEST_NUMBER:g}, got {given[name]!r:.50}")
    if not isinstance(layer_types := text.get("layer_types") or [], list):
        raise ValueError(f"layer_types must be a list of names, got {layer_types!r:.50}")
    if text.get("use_sliding_window") or "sliding_attention" in layer_types:
        raise ValueError("asks for sliding-window attention, which is not supported")
    if text.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be 'silu', got {text['hidden_act']!r}")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ("default", "mrope"):
        raise ValueError(f"asks for {rope_type!r} rotary scaling; supported: 'default', 'mrope'")


def _eos_token_ids(eos: int | list[int] | None) -> frozenset[int]:
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {eos!r:.50}")
    return frozenset(ids)
