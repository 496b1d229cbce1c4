"""The options of an engine (`EngineConfig`) and the architecture of a checkpoint (`ModelConfig`), both validated."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from mmvllm.quantization.config import CheckpointQuantization
from mmvllm.utils.arguments import check_arguments, check_int, is_number, with_checked_arguments
from mmvllm.utils.devices import auto_device
from mmvllm.utils.text import counted, listed

if TYPE_CHECKING:  # `mmvllm --help` reads EngineConfig and must not load torch
    import torch

logger = logging.getLogger(__name__)
MiB = 1024 * 1024
MAX_DEPTH = 1024
MIN_STEP_TIMEOUT = 2  # seconds; a busy process may send no heartbeat for a moment

# Limits of a step: a larger step keeps a GPU busy for longer, but leaves less memory for the KV cache.
LARGE_GPU_BYTES = 24 * 1024 * MiB
LARGE_STEPS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
SMALL_STEPS = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The fields that the ViTs of all families share; a family may add more.

    Args:
        depth: number of blocks.
        embed_dim: width of a block, a multiple of num_heads.
        intermediate_size: width inside a block's MLP.
        out_hidden_size: width of the embeddings that the ViT returns, equal to the decoder's hidden size.
        patch_size: side of a patch in pixels; a patch has `temporal_patch_size` frames, `in_channels` values per pixel.
        spatial_merge_size: spatial_merge_size x spatial_merge_size patches are merged into one embedding.
        hidden_act: activation inside a block's MLP.
    """

    depth: int
    embed_dim: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    hidden_act: str

    def __post_init__(self) -> None:
        _check_depth("vision_config's depth", self.depth)
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"the ViT's width must be a multiple of its number of heads, {self.num_heads}, got {self.embed_dim}"
            )
        if self.head_dim % 4:  # one half is rotated by the row and one by the column, in pairs
            raise ValueError(f"the ViT's head size must be a multiple of 4, got {self.head_dim}")
        if self.in_channels != 3:
            raise ValueError(f"vision_config's in_channels must be 3 (RGB images), got {self.in_channels}")

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch: channels * frames * height * width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def mm_embed_size(self) -> int:
        """Number of values in an embedding of the ViT; with DeepStack, more than the decoder's hidden size."""
        return self.out_hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts (arXiv 1701.06538) that replaces the decoder's MLP.

    Args:
        num_experts_per_tok: number of experts that each token is routed to.
        intermediate_size: width inside an expert.
        dense_layers: indexes of the decoder's layers that keep a dense MLP.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must be at most num_experts, {self.num_experts}, got {self.num_experts_per_tok}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The decoder and the ViT of a checkpoint; `vision` is None for a text-only checkpoint.

    Args:
        qkv_bias: whether the projections to queries, keys and values have a bias.
        qk_norm: whether each head of queries and keys is normalized before the rotary embedding.
        mrope_section: number of rotary frequencies for time, height and width; None in a text-only model.
        mrope_interleaved: whether the frequencies of the axes alternate; otherwise each axis has one contiguous run.
        experts: None for a dense model.
        quantization: how the checkpoint's weights are quantized; None if they are not.
    """

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
    mrope_interleaved: bool = False
    qkv_bias: bool
    qk_norm: bool
    experts: ExpertsConfig | None = None
    tie_word_embeddings: bool
    dtype: "torch.dtype"
    eos_token_ids: frozenset[int]
    quantization: CheckpointQuantization | None
    max_new_tokens: int | None = None  # limits every completion, whatever the request allows
    sampling_defaults: tuple[tuple[str, float], ...] = ()  # the checkpoint's defaults for SamplingParams
    vision: VisionConfig | None = None
    image_token_id: int | None = None
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None

    def __post_init__(self) -> None:
        _check_depth("num_hidden_layers", self.num_hidden_layers)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, {self.num_key_value_heads}, "
                f"got {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"the head size must be even, got {self.head_dim}")
        section = self.mrope_section
        if section is not None and (len(section) != 3 or 2 * sum(section) != self.head_dim):
            raise ValueError(
                "mrope_section must be three numbers that add up to half of the head size, "
                f"{self.head_dim}, got {list(section)}"
            )
        if self.vision is not None and self.vision.out_hidden_size != self.hidden_size:
            raise ValueError(
                f"vision_config's out_hidden_size must be the decoder's hidden_size, {self.hidden_size}, "
                f"got {self.vision.out_hidden_size}"
            )

    @property
    def mm_embed_size(self) -> int:
        """Number of values in an embedding that replaces a placeholder."""
        return self.hidden_size if self.vision is None else self.vision.mm_embed_size


def _check_depth(name: str, value: int) -> None:
    if value > MAX_DEPTH:  # layers are created before their weights are looked up
        raise ValueError(f"{name} must be at most {MAX_DEPTH}, got {value}")


def torch_dtype(name: Any) -> "torch.dtype | None":
    """Return the dtype with this name, or None if weights and KV cache cannot have it."""
    import torch

    return getattr(torch, name) if name in ("float32", "float16", "bfloat16") else None


DTYPES = ("auto", "float32", "float16", "bfloat16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}

# Arguments of vLLM's LLM that many programs pass, with the values that match what mmvllm does anyway; None accepts any.
ACCEPTED_VLLM_ARGUMENTS = {
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None,),
    "trust_remote_code": None,  # no code of a checkpoint is run
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "revision": (None,),
    "enable_chunked_prefill": (True, None),  # prompts are always chunked
    "limit_mm_per_prompt": None,  # a request may have as many images and videos as fit
    "swap_space": None,  # preempted sequences are recomputed, never swapped
    "disable_log_stats": None,  # nothing is logged
    "mm_processor_cache_gb": None,  # outputs of the ViT are cached, but not outputs of processors
    "runner": ("auto", "generate", "pooling"),  # every engine does both
    "enable_sleep_mode": (True, False),  # sleep mode is always available
    "hf_overrides": (None, {}),
    "download_dir": (None,),
    "speculative_config": (None,),
    "compilation_config": None,  # CUDA graphs are captured unless enforce_eager
    "skip_tokenizer_init": (False,),
    "generation_config": ("vllm",),  # sampling parameters that are left out have mmvllm's defaults
    "max_logprobs": None,  # the maximum is always 20
    "cpu_offload_gb": (0,),
    "disable_custom_all_reduce": None,  # mmvllm has no custom all-reduce
}
# vLLM's values of `quantization` for checkpoints whose config.json names the method.
CHECKPOINT_QUANTIZATION = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The options of an engine; an invalid value raises ValueError with the value and the allowed range.

    Args:
        device: "auto" (the first CUDA device that can be used, otherwise the CPU), "cpu", "cuda" or "cuda:N".
        tensor_parallel_size: number of devices that share one model's weights and compute each step together; above 1,
            the engine starts a process for each further device.
        dtype: dtype of weights and KV cache: "auto" (the checkpoint's; float32 for a float16 checkpoint on a CPU),
            "float32", "float16" or "bfloat16".
        load_format: "auto" or "safetensors" load the checkpoint's weights; "dummy" initializes random weights and needs
            only the config and the tokenizer.
        max_model_len: maximum length of prompt and completion together, in tokens; by default the checkpoint's maximum,
            or what fits in the KV cache.
        max_num_seqs: maximum number of sequences that run at the same time; temporarily lowered after a batch runs out
            of memory; by default 256 if the engine may use at least 24 GiB of GPU memory, otherwise 64.
        max_num_batched_tokens: maximum number of tokens computed in one step; longer prompts are computed in chunks; by
            default 8192 if the engine may use at least 24 GiB of GPU memory, otherwise 4096.
        max_vision_patches: maximum number of image patches encoded in one step; a larger image is encoded alone.
        kvcache_block_size: tokens per KV cache block, the unit of prefix sharing; by default 256 if FlashAttention
            (from flash-attn or from torch) runs the decoder, because it needs a multiple of 256, otherwise 16.
        num_kvcache_blocks: number of KV cache blocks; by default as many as gpu_memory_utilization allows
            (cpu_kvcache_bytes on a CPU), but not more than max_num_seqs sequences of maximum length can use.
        gpu_memory_utilization: fraction of the GPU's memory that the engine may use, in (0, 1].
        cpu_kvcache_bytes: size of the KV cache on a CPU, in bytes, for each process that shares the model.
        encoder_cache_bytes: size of the cache of ViT outputs on the device, in bytes; an image whose output is larger
            is refused.
        enable_prefix_caching: reuse the KV blocks of prefixes, images included, that were computed before.
        attention_backend: "auto" selects flash-attn ("flash") if it is installed and supports the model, then
            flash-attn-4 ("flash4"), then Triton, then plain torch (on a CPU always torch). A package is used only if
            its results are correct on a small input when the engine starts.
        vision_attention_backend: backend for the ViT; "auto" uses attention_backend if that supports the ViT, otherwise
            the first supported one of flash-attn, flash-attn-4, the kernels in torch, Triton and plain torch.
        quantization: "int8" quantizes weights while they are loaded, and activations dynamically, on a CPU only; "int4"
            rounds the decoder's weights to 4 bits in groups, and on a CPU the others to 8 bits; "fp8" rounds the
            decoder's weights and activations to 8-bit floats, for GPUs of compute capability 8.9 or above and dtype
            bfloat16; completions change slightly. By default, weights keep the dtype, and a quantized checkpoint stays
            quantized if the device can multiply its weights in that form.
        kv_cache_dtype: "int8" and "fp8" (e4m3) store keys and values in 8 bits with a scale for each token and KV head,
            in about half the memory of 16 bits; completions change slightly. Only plain torch and Triton support them;
            on a GPU, "fp8" needs compute capability 8.9 or above. "auto" uses the dtype of the weights.
        chat_template: a Jinja template, or a file with one, that replaces the checkpoint's chat template.
        lora: folder of a LoRA adapter, as PEFT saves it, that is merged into the weights when they are loaded.
        enable_lora: allow each request to select a LoRA adapter (`lora_request`); reserves memory for max_loras
            adapters. Steps with adapters run without CUDA graphs.
        max_loras: maximum number of different adapters that running requests use at the same time.
        max_lora_rank: maximum rank of a request's adapter; memory is reserved for this rank.
        enforce_eager: do not capture CUDA graphs for small steps; the engine starts faster and decodes more slowly.
        async_scheduling: launch a step before the tokens of the previous step are known; enabled by default where
            launches do not wait for the device: on CUDA with an attention backend that reads nothing on the host.
        step_timeout: seconds without a heartbeat after which a process of the engine is killed and the engine fails; a
            device that hangs while its process is alive is not detected.
        skip_warmup: do not run a warm-up batch at start.
        seed: seed for requests that set none, and for dummy weights.
    """

    device: str = "auto"
    tensor_parallel_size: int = 1
    dtype: "Literal['auto', 'float32', 'float16', 'bfloat16'] | torch.dtype" = "auto"
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_vision_patches: int = 16384
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kvcache_bytes: int = 1024 * MiB
    encoder_cache_bytes: int = 512 * MiB
    enable_prefix_caching: bool = True
    attention_backend: Literal["auto", "flash", "flash4", "triton", "torch"] = "auto"
    vision_attention_backend: Literal["auto", "flash", "flash4", "triton", "torch"] = "auto"
    quantization: Literal["int8", "int4", "fp8"] | None = None
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    chat_template: str | None = None
    lora: str | None = None
    enable_lora: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    step_timeout: float = 60.0
    skip_warmup: bool = False
    seed: int = field(default=0, metadata={"least": None})

    @classmethod
    def from_arguments(cls, owner: str, model: Any = None, /, **engine_args: Any) -> "EngineConfig":
        """Return the config for keyword arguments that a user passed to `owner`, such as "LLM", with this model.

        Raises TypeError with a suggestion for an unknown name. Ignores arguments of vLLM that change nothing, such as a
        `tokenizer` that equals the model.
        """
        if "tokenizer" in engine_args and model is not None and str(engine_args["tokenizer"]) == str(model):
            del engine_args["tokenizer"]
        if (size := engine_args.get("data_parallel_size", 1)) != 1:
            raise ValueError(
                f"data_parallel_size is {size!r}, but {owner} has one engine; AsyncLLM may have several, and mmvllm "
                "serve, demo and caption with --data-parallel-size"
            )
        known = [field.name for field in fields(cls)]
        return cls(**check_arguments(owner, engine_args, known, ACCEPTED_VLLM_ARGUMENTS))

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        if self.quantization in CHECKPOINT_QUANTIZATION:
            raise ValueError(
                f"quantization is {self.quantization!r}, but config.json of the checkpoint names it; leave it out"
            )
        for f in fields(self):
            value = getattr(self, f.name)
            if (f.type is bool or (f.type == bool | None and value is not None)) and not isinstance(value, bool):
                raise ValueError(f"{f.name} must be True or False, got {value!r}")
            if f.type is int or (f.type == int | None and value is not None):
                check_int(f.name, value, at_least={"seed": 0, "max_model_len": 2}.get(f.name, 1))
            if (choices := literal_choices(f.type)) and value not in choices:
                raise ValueError(f"{f.name} must be {listed(choices)}, got {value!r}")
        # A torch.device prints as "cuda:0", a torch.dtype as "torch.float32".
        if not re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", str(self.device)):
            raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {self.device!r}")
        if str(self.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"dtype must be {listed(DTYPES)}, got {self.dtype!r}")
        if not isinstance(self.lora, str | PathLike | None) or self.lora == "":
            raise ValueError(f"lora must be the folder of an adapter, got {self.lora!r}")
        if not isinstance(self.chat_template, str | PathLike | None) or self.chat_template == "":
            raise ValueError(f"chat_template must be a file or a Jinja template, got {self.chat_template!r}")
        timeout = self.step_timeout
        if not is_number(timeout) or not timeout >= MIN_STEP_TIMEOUT:
            raise ValueError(f"step_timeout must be a number of seconds, at least {MIN_STEP_TIMEOUT}, got {timeout!r}")
        share = self.gpu_memory_utilization
        if not is_number(share) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be a number in (0, 1], got {share!r}")

    def resolve_device(self) -> "torch.device":
        """Return the device to run on; raise ValueError if it does not exist. `auto_device` resolves "auto".

        With a `tensor_parallel_size` above 1, the other ranks use the devices that follow it.
        """
        import torch

        if self.device == "auto":
            device, reason = auto_device(self.gpu_memory_utilization)
            if reason:
                logger.warning("running on the CPU: %s", reason)
        else:
            device = torch.device(self.device)
        size, first = self.tensor_parallel_size, device.index or 0
        if device.type == "cuda" and first + size > (number := torch.cuda.device_count()):
            found = counted(number, "CUDA device") if number else "no CUDA devices"
            needed = f"device is {self.device!r}" + (f" and tensor_parallel_size is {size}" if size > 1 else "")
            raise ValueError(f"{needed}, but this torch ({torch.__version__}) sees {found}")
        return device

    def with_limits(self, device: "torch.device") -> "EngineConfig":
        """Return this config with defaults for the step limits that the user left out, chosen by the device's memory.

        On a GPU, only the share of the memory that `gpu_memory_utilization` allows counts.
        """
        import torch

        limits = SMALL_STEPS
        if device.type == "cuda":
            usable = torch.cuda.get_device_properties(device).total_memory * self.gpu_memory_utilization
            limits = LARGE_STEPS if usable >= LARGE_GPU_BYTES else SMALL_STEPS
        return replace(self, **{name: value for name, value in limits.items() if getattr(self, name) is None})

    def resolve_dtype(
        self, checkpoint_dtype: "torch.dtype", device: "torch.device", is_quantized: bool = False
    ) -> "torch.dtype":
        """Return the dtype of weights and KV cache; "auto" selects the checkpoint's, except for float16 on a CPU.

        On a CPU, float16 matmuls of 64 rows took 3 to 6 times as long as float32 ones (torch 2.13, AVX512). A float16
        checkpoint therefore runs in float32, which represents all its values, or in bfloat16 if it is quantized,
        because CPU kernels for quantized weights compute in bfloat16.
        """
        import torch

        if self.dtype == "auto":
            if device.type == "cpu" and checkpoint_dtype == torch.float16:
                return torch.bfloat16 if is_quantized else torch.float32
            return checkpoint_dtype
        return torch_dtype(str(self.dtype).removeprefix("torch."))

    def resolve_kv_dtype(self, dtype: "torch.dtype") -> "torch.dtype":
        """Return the dtype of the KV cache for weights of this dtype."""
        import torch

        return {"auto": dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[self.kv_cache_dtype]


@with_checked_arguments(ACCEPTED_VLLM_ARGUMENTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(EngineConfig):
    """The arguments of an `LLM`, as programs for vLLM write them: `LLM(**dataclasses.asdict(EngineArgs(...)))`.

    Args:
        model, mm_processor_kwargs: arguments of `LLM`; `EngineConfig` documents the other fields.
    """

    model: str | PathLike | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None


AsyncEngineArgs = EngineArgs


def given_engine_args(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the `values` that are fields of `EngineConfig` and are not None."""
    given = {field.name: values.get(field.name) for field in fields(EngineConfig)}
    return {name: value for name, value in given.items() if value is not None}


def literal_choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values of `Literal[...]` or `Literal[...] | None`, None first; () for another annotation."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return arguments
    if len(arguments) == 2 and arguments[1] is NoneType:
        return (None, *choices) if (choices := literal_choices(arguments[0])) else ()
    return ()
