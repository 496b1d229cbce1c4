"""Linear layers, whose weights a `LinearMethod` may process and multiply."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mmvllm.kernels.fp8 import Fp8Rows
from mmvllm.kernels.silu_mul import silu_mul, silu_mul_fp8
from mmvllm.layers.batch import AdapterRows
from mmvllm.layers.lora import AdapterStack
from mmvllm.layers.sharding import CheckpointView, Shard
from mmvllm.quantization.fp8 import Fp8Linear
from mmvllm.quantization.linear_method import LinearMethod
from mmvllm.quantization.onednn import OneDNNGate, OneDNNLinear
from mmvllm.quantization.quantized_tensor import QuantizedParts, QuantizedTensor

_CACHED_ROWS = 1024


class AssembledModule(ABC):
    """A module whose parameters are assembled from tensors of the checkpoint."""

    @abstractmethod
    def checkpoint_views(self) -> Iterator[CheckpointView]:
        """Yield one view for each tensor of the checkpoint; values that no view covers are padding and are zero."""


class LinearMethodModule(AssembledModule):
    """A module whose weights are processed by a `LinearMethod` after loading.

    Args:
        linear_method_cls: how the weights are stored and multiplied; None keeps them as parameters.
    """

    linear_method_cls: type[LinearMethod] | None = None

    @abstractmethod
    def weight_shapes(self) -> Sequence[torch.Size]:
        """Return the shape (out, in) of each weight."""

    @abstractmethod
    def process_weights_after_loading(self) -> None:
        """Process the weights; called once, when all values have been copied."""


class Linear(nn.Linear, LinearMethodModule):
    """A linear layer: x (N, in) -> x Wᵀ + b.

    A size may be a `Shard`, this rank's part. If the inputs are sharded, there is no bias, and the caller sums the
    results of all ranks. With `Fp8Linear`, inputs are quantized too, unless they already are. If the weight is
    quantized while loading, its scales are computed from the rank's part of each row.
    """

    linear_method: LinearMethod | None = None
    quantized_parts: QuantizedParts | None = None  # the checkpoint's quantized weight, until it is processed
    group_size: int | None = None  # group size of the checkpoint's quantized weight
    adapters: AdapterStack | None = None  # None unless requests may have adapters

    def __init__(self, in_size: int | Shard, out_size: int | Shard, bias: bool = True):
        rows, columns = Shard.of(out_size), Shard.of(in_size)
        assert not bias or columns.length == columns.whole, "each rank would add the bias"
        super().__init__(columns.length, rows.length, bias=bias)
        self.rows, self.columns = rows, columns

    @property
    def is_fp8(self) -> bool:
        return self.linear_method_cls is Fp8Linear

    def weight_shapes(self) -> Sequence[torch.Size]:
        return (torch.Size((self.out_features, self.in_features)),)

    def keep_quantized(self, group_size: int) -> None:
        """Keep the checkpoint's quantized weight, in groups of this size; call it before weights are loaded."""
        self.quantized_parts, self.group_size, self.weight = QuantizedParts(*self.weight_shapes()), group_size, None

    def process_weights_after_loading(self) -> None:
        if self.linear_method_cls is not None:
            weight = self.weight if self.quantized_parts is None else self.quantized_parts.joined()
            self.linear_method = self._make_method(weight)
            self.weight = self.quantized_parts = None

    def _make_method(self, weight: Tensor | QuantizedTensor) -> LinearMethod:
        return self.linear_method_cls(weight, self.bias)

    def checkpoint_views(self) -> Iterator[CheckpointView]:
        yield from self._views(self.rows)

    def _views(self, rows: Shard, start: int = 0, part: int | None = None) -> Iterator[CheckpointView]:
        """Yield views of the tensors whose rows begin at row `start` of the parameter."""
        at = slice(start, start + rows.length)
        columns = slice(self.columns.length)
        if self.quantized_parts is not None:
            yield CheckpointView("weight", part, self.quantized_parts.view(at, columns), (rows, self.columns))
        elif self.weight is not None:
            yield CheckpointView("weight", part, self.weight.data[at, columns], (rows, self.columns))
        if self.bias is not None:
            yield CheckpointView("bias", part, self.bias.data[at], (rows,))

    def part_widths(self) -> Sequence[int]:
        """Return the number of outputs of each layer of the checkpoint."""
        return (self.out_features,)

    def forward(self, x: Tensor | Fp8Rows, adapters: AdapterRows | None = None) -> Tensor:
        y = self._product(x)
        if adapters is not None:
            self.adapters.add(y, x, adapters)
        return y

    def _product(self, x: Tensor | Fp8Rows) -> Tensor:
        return nn.Linear.forward(self, x) if self.linear_method is None else self.linear_method(x)


class MergedLinear(Linear):
    """Several linear layers of the checkpoint stacked into one; a single product computes all outputs.

    Returns one output per entry of `out_sizes`, with `padding` more values than the checkpoint's weight has rows.
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

    def _make_method(self, weight: Tensor | QuantizedTensor) -> LinearMethod:
        # Adapters add to the activation's input, which a fused gate does not expose.
        if self.linear_method_cls is OneDNNLinear and self.adapters is None:
            return OneDNNGate(weight, self.bias)
        return super()._make_method(weight)

    def forward(self, x: Tensor | Fp8Rows, adapters: AdapterRows | None = None) -> Tensor | Fp8Rows:
        """Return the gated activation, quantized to 8 bits with `Fp8Linear`."""
        if isinstance(self.linear_method, OneDNNGate):
            return self.linear_method(x)
        gate_up = Linear.forward(self, x, adapters)
        return silu_mul_fp8(gate_up) if self.is_fp8 else silu_mul(gate_up)


class PaddedLinear(Linear):
    """A linear layer whose input has `padding` more values than the checkpoint's weight has columns."""

    def __init__(self, in_size: int | Shard, out_size: int, bias: bool, padding: int):
        columns = Shard.of(in_size)
        super().__init__(columns.length + padding, out_size, bias=bias)
        self.columns = columns


def by_rows(layers: Callable[..., Tensor], x: Tensor | Fp8Rows, adapters: AdapterRows | None = None) -> Tensor:
    """Return layers(x); on a CPU, chunks of rows of x (N, C) keep wide intermediate results in the cache.

    `layers` also takes the adapters of the rows, if there are any.

    Chunks also keep intermediate tensors below 32 MiB. For larger ones, the C library maps new pages every time, and
    clearing them takes longer than computing the layer.
    """
    if isinstance(x, Fp8Rows) or x.device.type != "cpu" or len(x) <= _CACHED_ROWS:
        return layers(x) if adapters is None else layers(x, adapters)
    if adapters is None:
        return torch.cat([layers(rows) for rows in x.split(_CACHED_ROWS)])
    starts = range(0, len(x), _CACHED_ROWS)
    return torch.cat([layers(x[i : i + _CACHED_ROWS], adapters.among(i, i + _CACHED_ROWS)) for i in starts])


def weight_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of a model's weights in `dtype`, or as their linear methods store them; also for a meta model.

    A head with a linear method counts as a copy, even if it is tied to the embedding.
    """
    total, shared = 0, set()
    for module in model.modules():
        own = module.named_parameters(recurse=False)
        if isinstance(module, LinearMethodModule) and module.linear_method_cls is not None:
            group_size = getattr(module, "group_size", None)
            total += sum(
                module.linear_method_cls.num_bytes(shape, dtype, group_size) for shape in module.weight_shapes()
            )
            own = [(name, parameter) for name, parameter in own if parameter.dim() == 1]
        for _, parameter in own:
            if parameter not in shared:
                shared.add(parameter)
                total += parameter.numel() * dtype.itemsize
    return total
