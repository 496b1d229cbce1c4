"""Which part of a checkpoint's tensor a rank holds."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mmvllm.processes.ranks import Ranks
from mmvllm.quantization.quantized_tensor import QuantizedPartView


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of one dimension: `length` of `whole` values, from `start` on."""

    start: int
    length: int
    whole: int

    @classmethod
    def of(cls, size: "int | Shard") -> "Shard":
        """A shard as it is; all of a dimension that is given by its size."""
        return size if isinstance(size, Shard) else cls(0, size, size)

    @classmethod
    def cut(cls, whole: int, ranks: Ranks) -> "Shard":
        """The rank's part: a quotient that is rounded up, so only the last ranks have less, or nothing."""
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
    """The length of the longest of the ranks' shards."""
    return -(-whole // ranks.size)


class CheckpointView(NamedTuple):
    """Where the values of a checkpoint's tensor are copied to.

    Args:
        part: None where the parameter has one such tensor.
        view: a part of the parameter.
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
