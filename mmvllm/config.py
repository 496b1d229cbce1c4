"""What the checkpoint says (`ModelConfig`) and what the user chose (`EngineConfig`): frozen, checked once."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch

MiB = 1024 * 1024
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The ViT. Defaults are those of transformers' class, because sparse configs rely on them."""

    depth: int = 32
    embed_dim: int = 1280
    num_heads: int = 16
    mlp_ratio: int = 4
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    hidden_size: int = 3584
    hidden_act: str = "quick_gelu"

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Values in one patch: channels * frames * height * width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder, with a ViT in front unless `vision` is None (a text-only checkpoint)."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...] | None
    tie_word_embeddings: bool
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    image_token_id: int | None
    quantization: str | None
    vision: VisionConfig | None

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "ModelConfig":
        """Read `config.json` and `generation_config.json` of a checkpoint folder.

        Understands the published flat layout, transformers 5's nested one (`text_config`, `rope_parameters`, `dtype`)
        and configs that leave out vision values. Raises ValueError for a folder or a config that cannot be served.
        """
        raw = _read_json(Path(folder) / "config.json")
        if raw is None:
            raise ValueError(f"{folder}: not a checkpoint folder, it has no config.json")
        text = {**raw, **(raw.get("text_config") or {})}
        architecture = (raw.get("architectures") or [raw.get("model_type", "unknown")])[0]
        needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if missing := [name for name in needed if not isinstance(text.get(name), int)]:
            raise ValueError(f"{folder}/config.json ({architecture}) does not give {', '.join(missing)}")
        if text.get("use_sliding_window"):
            raise ValueError(f"{folder}/config.json asks for sliding-window attention, which is not supported")
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type not in ("default", "mrope"):
            raise ValueError(
                f"{folder}/config.json asks for {rope_type!r} rotary scaling; supported: 'default', 'mrope'"
            )
        heads = text["num_attention_heads"]
        section = rope.get("mrope_section")
        quantization = raw.get("quantization_config")
        return cls(
            architecture=architecture,
            hidden_size=text["hidden_size"],
            intermediate_size=text["intermediate_size"],
            num_hidden_layers=text["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            vocab_size=text["vocab_size"],
            max_position_embeddings=text.get("max_position_embeddings") or 32768,
            rms_norm_eps=text.get("rms_norm_eps") or 1e-6,
            rope_theta=float(rope.get("rope_theta") or text.get("rope_theta") or 1e6),
            mrope_section=tuple(section) if section else None,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
            dtype=DTYPES.get(text.get("dtype") or text.get("torch_dtype") or "float32", torch.float32),
            eos_token_ids=_eos_token_ids(Path(folder), text),
            image_token_id=raw.get("image_token_id"),
            quantization=quantization.get("quant_method", "unknown") if quantization else None,
            vision=_vision_config(raw["vision_config"]) if "vision_config" in raw else None,
        )


def _vision_config(raw: dict) -> VisionConfig:
    return VisionConfig(**{f.name: raw[f.name] for f in fields(VisionConfig) if raw.get(f.name) is not None})


def _eos_token_ids(folder: Path, text: dict) -> frozenset[int]:
    generation = _read_json(folder / "generation_config.json") or {}
    eos = generation.get("eos_token_id", text.get("eos_token_id"))
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])


def _read_json(path: Path) -> dict | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the user chose. `LLM` documents each field; a wrong value raises ValueError with the value and the range."""

    device: str = "auto"
    dtype: str | torch.dtype = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 4096
    max_vision_patches: int = 16384
    kvcache_block_size: int = 16
    num_kvcache_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kvcache_bytes: int = 1024 * MiB
    encoder_cache_bytes: int = 512 * MiB
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    skip_warmup: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_vision_patches",
            "kvcache_block_size",
            "num_kvcache_blocks",
            "cpu_kvcache_bytes",
            "encoder_cache_bytes",
        ):
            value = getattr(self, name)
            optional = name in ("max_model_len", "num_kvcache_blocks") and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}, must be an integer of at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization!r}, must be in (0, 1]")
        if self.load_format not in ("auto", "safetensors", "dummy"):
            raise ValueError(f"load_format is {self.load_format!r}, must be 'auto', 'safetensors' or 'dummy'")

    def resolve_device(self) -> torch.device:
        """The device to run on: 'auto' is CUDA where there is one."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError):
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}, must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device!r}, but this torch ({torch.__version__}) sees no CUDA device")
        return device

    def resolve_dtype(self, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """The dtype of weights and KV cache: 'auto' is the checkpoint's, but float32 for a float16 one on a CPU,
        whose half-precision arithmetic is emulated."""
        if self.dtype == "auto":
            slow = device.type == "cpu" and checkpoint_dtype == torch.float16
            return torch.float32 if slow else checkpoint_dtype
        dtype = DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in DTYPES.values():
            raise ValueError(f"dtype is {self.dtype!r}, must be 'auto', 'float32', 'float16' or 'bfloat16'")
        return dtype
