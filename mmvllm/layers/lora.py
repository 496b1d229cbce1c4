"""The LoRA matrices (arXiv 2106.09685) of one linear layer, for every adapter slot on the device."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mmvllm.kernels.fp8 import Fp8Rows
from mmvllm.kernels.lora import lora_add
from mmvllm.layers.batch import AdapterRows
from mmvllm.layers.sharding import Shard

Region = tuple[Shard, Shard]  # the rows and the columns of a checkpoint's weight that a rank holds
Matrices = tuple[Tensor, Tensor]  # a (r, in) and b (out, r) of a whole weight, b with the adapter's scale


class AdapterStack:
    """LoRA matrices of every slot, padded with zeros to the largest rank.

    Args:
        widths: number of outputs of each part of the layer.
        regions: region of each part, by the part's number in `CheckpointView`.
    """

    def __init__(
        self,
        num_slots: int,
        rank: int,
        in_size: int,
        widths: Sequence[int],
        regions: Mapping[int | None, Region],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.a = torch.zeros(num_slots, len(widths), rank, in_size, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, sum(widths), rank, dtype=dtype, device=device)
        self._widths, self._regions = tuple(widths), regions
        self._used: set[int] = set()  # slots whose adapters adapt this layer

    def write(self, slot: int, matrices: Mapping[int | None, Matrices]) -> None:
        """Copy an adapter's matrices, by part, into a slot, without waiting for the copies."""
        if slot in self._used:
            self.a[slot].zero_()
            self.b[slot].zero_()
            self._used.discard(slot)
        starts = accumulate(self._widths, initial=0)
        for i, (start, (part, (rows, columns))) in enumerate(zip(starts, self._regions.items(), strict=False)):
            if part in matrices:
                a, b = matrices[part]
                self.a[slot, i, : len(a), : columns.length].copy_(a[:, columns.slice], non_blocking=True)
                self.b[slot, start : start + rows.length, : len(a)].copy_(b[rows.slice], non_blocking=True)
                self._used.add(slot)

    def add(self, y: Tensor, x: Tensor | Fp8Rows, rows: AdapterRows) -> None:
        """Add the outputs of these rows' adapters for x (N, in) to y (N, out), in place."""
        if not self._used.isdisjoint(rows.slots):
            x = x.values.to(y.dtype) * x.scale[:, None].to(y.dtype) if isinstance(x, Fp8Rows) else x
            self.compute(y, x, rows)

    def compute(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Do the work of `add`, even for slots that are empty in this layer."""
        lora_add(y, x.contiguous(), self.a, self.b, rows.rows, rows.ends, self._widths)
