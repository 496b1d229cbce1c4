"""The parts of a checkpoint's tensors that a rank has."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mmvllm.processes.ranks import Ranks
from mmvllm.quantization.quantized_tensor import QuantizedPartView


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of one dimension: `length` of `whole` values, starting at `start`."""

    start: int
    length: int
    whole: int

    @classmethod
    def of(cls, size: "int | Shard") -> "Shard":
        """Return a shard unchanged; for a size, return the shard that is the whole dimension."""
        return size if isinstance(size, Shard) else cls(0, size, size)

    @classmethod
    def cut(cls, whole: int, ranks: Ranks) -> "Shard":
        """Return the rank's part; the width is rounded up, so only the last ranks have less, or nothing."""
        width = shard_width(whole, ranks)
        start = min(ranks.rank * width, whole)
        return cls(start, min(width, whole - start), whole)

    def times(self, number: int) -> "Shard":
        """Scale the shard to a dimension with `number` values per unit: from heads to their values."""
        return Shard(self.start * number, self.length * number, self.whole * number)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.length)


def shard_width(whole: int, ranks: Ranks) -> int:
    """Return the length of the longest of the ranks' shards."""
    return -(-whole // ranks.size)


class CheckpointView(NamedTuple):
    """The view of a parameter that a checkpoint's tensor is copied to.

    Args:
        part: number of the tensor in the parameter; None if the parameter has only one.
        view: the tensor's part of the parameter.
        region: the part of the tensor that is copied, by dimension.
    """

    parameter: str
    part: int | None
    view: Tensor | QuantizedPartView
    region: tuple[Shard, ...]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(shard.whole for shard in self.region)

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the region in the tensor."""
        return tuple(shard.slice for shard in self.region)
