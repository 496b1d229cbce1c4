"""Linear layers, and which of their weights are packed for a CPU."""

import ctypes
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mmvllm.batch import AdapterRows
from mmvllm.kernels.fp8 import E4M3, Fp8Rows, quantize_rows, scaled_linear
from mmvllm.kernels.silu_mul import silu_mul, silu_mul_fp8
from mmvllm.layers.fp8 import Fp8View, check_sizes
from mmvllm.layers.lora import AdapterStack
from mmvllm.layers.packed import Int8Weight, PackedGate, PackedWeight
from mmvllm.layers.sharding import CheckpointView, Shard

_CACHED_ROWS = 1024


class PackableModule(ABC):
    """A module whose weights can be packed for CPUs."""

    @abstractmethod
    def pack(self, int8: bool = False) -> None:
        """Replace the plain weights by packed ones, or by weights of 8 bits."""


class AssembledModule(ABC):
    """A module whose parameters are not tensors of the checkpoint as they are, but are assembled from such."""

    @abstractmethod
    def checkpoint_views(self) -> Iterator[CheckpointView]:
        """Of each tensor of the checkpoint; what no view covers is padding, and is zero."""


class Linear(nn.Linear, PackableModule, AssembledModule):
    """x (N, in) -> x Wᵀ + b; packing discards the plain weight.

    A size that is a shard is that of the rank: with a part of the inputs, which allows no bias, the result is to be
    added to those of the other ranks. With a weight of 8-bit floats, inputs are rounded to 8 bits as well, unless they
    are already. Scales of 8 bits are those of the rank's part of a row.
    """

    packed: PackedWeight | Int8Weight | PackedGate | None = None
    is_fp8 = False
    adapters: AdapterStack | None = None  # where requests may have adapters of their own

    def __init__(self, in_size: int | Shard, out_size: int | Shard, bias: bool = True):
        rows, columns = Shard.of(out_size), Shard.of(in_size)
        assert not bias or columns.length == columns.whole, "each rank would add the bias"
        super().__init__(columns.length, rows.length, bias=bias)
        self.rows, self.columns = rows, columns

    def pack(self, int8: bool = False) -> None:
        self.packed = (Int8Weight if int8 else PackedWeight)(self.weight, self.bias)
        self.weight = None

    def use_fp8(self) -> None:
        """Replace the weight by one in e4m3, without values, and the scales (out,) of its rows.

        Raises ValueError for a weight of sizes that GPUs do not multiply.
        """
        check_sizes(self.weight)
        self.weight = nn.Parameter(torch.empty_like(self.weight, dtype=E4M3), requires_grad=False)
        self.register_buffer("scale", torch.empty_like(self.weight[:, 0], dtype=torch.float32))
        self.is_fp8 = True

    def checkpoint_views(self) -> Iterator[CheckpointView]:
        yield from self._views(self.rows)

    def _views(self, rows: Shard, start: int = 0, part: int | None = None) -> Iterator[CheckpointView]:
        """Of tensors whose `rows` follow each other from row `start` on."""
        at = slice(start, start + rows.length)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                yield CheckpointView(name, part, parameter.data[at], (rows,))
            else:
                view = parameter.data[at, : self.columns.length]
                view = Fp8View(view, self.scale[at]) if self.is_fp8 else view
                yield CheckpointView(name, part, view, (rows, self.columns))

    def part_widths(self) -> Sequence[int]:
        """Outputs of each layer of the checkpoint."""
        return (self.out_features,)

    def forward(self, x: Tensor | Fp8Rows, adapters: AdapterRows | None = None) -> Tensor:
        y = self._product(x)
        if adapters is not None:
            self.adapters.add(y, x, adapters)
        return y

    def _product(self, x: Tensor | Fp8Rows) -> Tensor:
        if self.is_fp8:
            rows = x if isinstance(x, Fp8Rows) else quantize_rows(x)
            return scaled_linear(rows, self.weight, self.scale, self.bias)
        return nn.Linear.forward(self, x) if self.packed is None else self.packed(x)


class MergedLinear(Linear):
    """Several linear layers of the checkpoint stacked into one, so that a single product computes all outputs.

    x -> one output per entry of `out_sizes`, with `padding` more values than the checkpoint's weight has rows.
    """

    def __init__(self, in_size: int, out_sizes: Sequence[int | Shard], bias: bool, padding: int = 0):
        shards = tuple(map(Shard.of, out_sizes))
        sizes = [shard.length + padding for shard in shards]
        super().__init__(in_size, sum(sizes), bias=bias)
        self.shards, self.out_sizes = shards, sizes

    def checkpoint_views(self) -> Iterator[CheckpointView]:
        start = 0
        for part, (shard, size) in enumerate(zip(self.shards, self.out_sizes, strict=True)):
            yield from self._views(shard, start, part)
            start += size

    def part_widths(self) -> Sequence[int]:
        return self.out_sizes

    def forward(self, x: Tensor | Fp8Rows, adapters: AdapterRows | None = None) -> tuple[Tensor, ...]:
        return super().forward(x, adapters).split(self.out_sizes, dim=-1)


class SiluGate(MergedLinear):
    """The first half of a gated MLP (arXiv 2002.05202): x (N, in) -> silu(x Gᵀ + g) * (x Uᵀ + u) (N, I)."""

    def __init__(self, in_size: int, intermediate_size: int | Shard, bias: bool = False, padding: int = 0):
        super().__init__(in_size, [intermediate_size] * 2, bias=bias, padding=padding)

    def pack(self, int8: bool = False) -> None:
        if int8 or self.adapters is not None:  # which add to what the activation is applied to
            super().pack(int8)
        else:
            self.packed, self.weight = PackedGate(self.weight, self.bias), None

    def forward(self, x: Tensor | Fp8Rows, adapters: AdapterRows | None = None) -> Tensor | Fp8Rows:
        """With a weight of 8-bit floats, the result is rounded to 8 bits too."""
        if isinstance(self.packed, PackedGate):
            return self.packed(x)
        gate_up = Linear.forward(self, x, adapters)
        return silu_mul_fp8(gate_up) if self.is_fp8 else silu_mul(gate_up)


class PaddedLinear(Linear):
    """A linear layer whose input has `padding` more values than the checkpoint's weight has columns."""

    def __init__(self, in_size: int | Shard, out_size: int, bias: bool, padding: int):
        columns = Shard.of(in_size)
        super().__init__(columns.length + padding, out_size, bias=bias)
        self.columns = columns


def by_rows(layers: Callable[..., Tensor], x: Tensor | Fp8Rows, adapters: AdapterRows | None = None) -> Tensor:
    """layers(x), on a CPU in chunks of rows of x (N, C), so that wide intermediate results stay in the cache.

    `layers` also takes the adapters of these rows, where there are any.

    Chunks also keep intermediate tensors below 32 MiB. For larger ones the C library maps new pages every time, and
    clearing them takes longer than computing the layer.
    """
    if isinstance(x, Fp8Rows) or x.device.type != "cpu" or len(x) <= _CACHED_ROWS:
        return layers(x) if adapters is None else layers(x, adapters)
    if adapters is None:
        return torch.cat([layers(rows) for rows in x.split(_CACHED_ROWS)])
    starts = range(0, len(x), _CACHED_ROWS)
    return torch.cat([layers(x[i : i + _CACHED_ROWS], adapters.among(i, i + _CACHED_ROWS)) for i in starts])


def pack_weights(model: nn.Module, dtype: torch.dtype, int8: bool) -> None:
    """Pack the weights of linear layers and experts for fast products on a CPU, or quantize them to 8 bits.

    Float32 weights are not packed, because packed products have about twice the rounding error, nor are weights of a
    dtype that oneDNN does not support on this CPU, nor weights of 8-bit floats. Raises ValueError if int8 is not
    supported here.
    """
    if int8 and not torch.backends.mkldnn.is_available():
        raise ValueError("quantization='int8' needs a torch with oneDNN, which this torch lacks")
    if int8 and dtype == torch.float16:
        raise ValueError("quantization='int8' needs dtype float32 or bfloat16; this is float16")
    if int8 and not _sums_8_bits():
        raise ValueError("quantization='int8' needs a CPU that adds 8-bit products in 32 bits (VNNI or AMX)")
    if int8 or packs_well(dtype):
        for module in model.modules():
            if isinstance(module, PackableModule) and not getattr(module, "is_fp8", False):
                module.pack(int8)
                _return_freed_memory()


def weight_bytes(model: nn.Module, dtype: torch.dtype, device: torch.device, int8: bool = False) -> int:
    """Bytes of a model's weights in `dtype`, packed as `pack_weights` does on a CPU; the model may be a meta one.

    A packed head is a copy, also if it is tied to the embedding; int8 weights have 12 more bytes per output, weights of
    8-bit floats 4.
    """
    is_packed, total, shared = int8 or (device.type == "cpu" and packs_well(dtype)), 0, set()
    for module in model.modules():
        total += sum(scale.nbytes for scale in module.buffers(recurse=False))
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == E4M3:
                total += parameter.numel()
            elif is_packed and isinstance(module, PackableModule) and parameter.dim() > 1:
                num_outputs = parameter.shape[:-1].numel()
                total += parameter.numel() + 12 * num_outputs if int8 else parameter.numel() * dtype.itemsize
            elif parameter not in shared:
                shared.add(parameter)
                total += parameter.numel() * dtype.itemsize
    return total


def _return_freed_memory() -> None:
    """To the system, which the C library does not do by itself: it would keep as much as a fifth of the weights."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc
        trim(0)


def packs_well(dtype: torch.dtype) -> bool:
    """Whether oneDNN supports packed weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    supported = {torch.bfloat16: ops._is_mkldnn_bf16_supported, torch.float16: ops._is_mkldnn_fp16_supported}
    return dtype in supported and supported[dtype]()


def _sums_8_bits() -> bool:
    """Whether int8 products are exact: without VNNI, oneDNN adds pairs of them in 16 bits, which overflow."""
    ones = torch.ones(16, 64)
    return bool((Int8Weight(ones, None)(ones) - 64).abs().max() < 1)
