"""What the user chose (`EngineConfig`), and what all checkpoints state (`ModelConfig`): frozen, checked once."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch

MiB = 1024 * 1024
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(ABC):
    """What every ViT has in common; a family adds its own fields.

    Args:
        depth: number of blocks.
        embed_dim: width of a block; num_heads divide it.
        patch_size: pixels of a patch's side; `temporal_patch_size` frames deep, `in_channels` values a pixel.
        spatial_merge_size: so many patches squared become one row.
        hidden_size: width of a row, which is the decoder's.
    """

    depth: int
    embed_dim: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    hidden_size: int

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    @abstractmethod
    def intermediate_size(self) -> int:
        """Width inside a block's MLP."""

    @property
    def patch_dim(self) -> int:
        """Values in one patch: channels * frames * height * width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def row_size(self) -> int:
        """Values in a row that the ViT makes of merged patches; more than the hidden size in some families."""
        return self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
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
    quantization: str | None
    vision: VisionConfig | None = None
    image_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, "
                f"must be a multiple of num_key_value_heads, {self.num_key_value_heads}"
            )
        section = self.mrope_section
        if section is not None and (len(section) != 3 or 2 * sum(section) != self.head_dim):
            raise ValueError(
                f"mrope_section is {list(section)}, must be three numbers that add up to half of the head size, "
                f"{self.head_dim}"
            )
        if self.vision is not None and self.vision.hidden_size != self.hidden_size:
            raise ValueError(
                f"vision_config's hidden_size is {self.vision.hidden_size}, must be the decoder's, {self.hidden_size}"
            )

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Head sizes that the attention backend must serve."""
        return (self.head_dim,) if self.vision is None else (self.head_dim, self.vision.head_dim)

    @property
    def row_size(self) -> int:
        """Values in a row that replaces a placeholder."""
        return self.hidden_size if self.vision is None else self.vision.row_size


def _check_int(name: str, value: Any, at_least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise ValueError(f"{name} is {value!r}, must be an integer of at least {at_least}")


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
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kvcache_bytes: int = 1024 * MiB
    encoder_cache_bytes: int = 512 * MiB
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    quantization: str | None = None
    enforce_eager: bool = False
    skip_warmup: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type is bool and not isinstance(value, bool):
                raise ValueError(f"{f.name} is {value!r}, must be True or False")
            if f.type is int or (f.type == int | None and value is not None):
                _check_int(f.name, value, at_least={"seed": 0, "max_model_len": 2}.get(f.name, 1))
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization is {share!r}, must be a number in (0, 1]")
        if self.load_format not in ("auto", "safetensors", "dummy"):
            raise ValueError(f"load_format is {self.load_format!r}, must be 'auto', 'safetensors' or 'dummy'")
        if self.quantization not in (None, "int8"):
            raise ValueError(f"quantization is {self.quantization!r}, must be None or 'int8'")

    @classmethod
    def from_arguments(cls, owner: str, **engine_args: Any) -> "EngineConfig":
        """The config of keyword arguments that a user gave to `owner`; unknown ones raise TypeError."""
        known = [field.name for field in fields(cls)]
        for name in engine_args:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
                raise TypeError(f"{owner} has no argument {name!r}{hint}")
        return cls(**engine_args)

    def resolve_device(self) -> torch.device:
        """The device to run on: 'auto' is CUDA where there is one."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError):
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}, must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"device is {self.device!r}, but this torch ({torch.__version__}) sees "
                f"{torch.cuda.device_count() or 'no'} CUDA devices"
            )
        return device

    def resolve_dtype(self, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """The dtype of weights and KV cache: 'auto' is the checkpoint's, but float32 for a float16 one on a CPU.

        There float16 products of 64 rows took 3 to 6 times as long as float32 ones (torch 2.13, AVX512).
        """
        if self.dtype == "auto":
            slow = device.type == "cpu" and checkpoint_dtype == torch.float16
            return torch.float32 if slow else checkpoint_dtype
        dtype = DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in DTYPES.values():
            raise ValueError(f"dtype is {self.dtype!r}, must be 'auto', 'float32', 'float16' or 'bfloat16'")
        return dtype
