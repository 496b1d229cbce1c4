"""Tensor-parallel ranks, one process per device, and the collectives between them.

The decoder's weights are split over the ranks as in Megatron-LM (arXiv 1909.08053); a layer's output is the sum of the
ranks' results. All ranks run the same steps, so they submit the same operations in the same order. A rank that fails in
a step still takes part in its remaining operations, which the other ranks would otherwise wait for.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mmvllm.errors import first_line

TIMEOUT = timedelta(minutes=10)  # per operation; longer than any rank computes between two operations


class RanksFailed(RuntimeError):
    """The ranks can no longer communicate: one has ended, or did not take part in time."""


class CollectiveError(RanksFailed):
    """This rank cannot take part in an operation that the other ranks wait for."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective: "all_reduce", "gather", "broadcast", or "graph" for all operations inside a CUDA graph."""

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    source: int = 0  # the rank that broadcasts


class Ranks:
    """A single rank without communication, and the interface of all ranks."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x, which has the same shape on all ranks, in place."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate all ranks' x (R, V') to (R, size * V') on rank 0; other ranks return their x."""
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with the source rank's x, in place."""
        return x

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers."""
        return number

    def expect(self, operations: Iterable[Operation]) -> None:
        """Begin a step that consists of these operations; until `complete`, any other operation is refused."""

    def done_in_graph(self) -> None:
        """Record that a CUDA graph with operations was launched."""

    def complete(self) -> None:
        """End a step; after an error, take part in its remaining operations with zeros."""


SINGLE = Ranks()


class ConnectedRanks(Ranks):
    """One of several connected ranks. All operations may raise RanksFailed.

    Args:
        backend: the process group that connects the ranks.
    """

    def __init__(self, backend: dist.ProcessGroup, rank: int, size: int, device: torch.device):
        self._backend, self.rank, self.size, self._device = backend, rank, size, device
        self._expected: deque[Operation] | None = None

    @classmethod
    def connect(cls, store: dist.Store, rank: int, size: int, device: torch.device) -> "ConnectedRanks":
        """Connect to the other ranks through the store, waiting for them; GPUs use NCCL, CPUs use Gloo."""
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            return cls(dist.ProcessGroupNCCL(store, rank, size, options), rank, size, device)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return cls(dist.ProcessGroupGloo(store, rank, size, options), rank, size, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        self._run(Operation("all_reduce", tuple(x.shape), x.dtype), lambda: self._backend.allreduce([x]))
        return x

    def gather(self, x: Tensor) -> Tensor:
        options = dist.GatherOptions()
        options.rootRank = 0
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        operation = Operation("gather", tuple(x.shape), x.dtype)
        self._run(operation, lambda: self._backend.gather([parts] if parts else [], [x], options))
        return torch.cat(parts, dim=1) if parts else x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = source
        operation = Operation("broadcast", tuple(x.shape), x.dtype, source)
        self._run(operation, lambda: self._backend.broadcast([x], options))
        return x

    def least(self, number: int) -> int:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        x = torch.tensor([number], device=self._device)
        self._run(Operation("all_reduce", (1,), x.dtype), lambda: self._backend.allreduce([x], options))
        return int(x)

    def expect(self, operations: Iterable[Operation]) -> None:
        self._expected = deque(operations)

    def done_in_graph(self) -> None:
        self._take(Operation("graph"))

    def complete(self) -> None:
        while self._expected:
            self._take_part(self._expected[0])
        self._expected = None

    def abort(self) -> None:
        """Make operations that wait for other ranks fail; may be called from any thread."""
        self._backend.abort()

    def close(self) -> None:
        """Close the connections; no operation can follow."""
        self._backend = None

    def _take_part(self, operation: Operation) -> None:
        if operation.kind == "graph":
            raise CollectiveError(f"rank {self.rank} could not launch a CUDA graph that the other ranks have launched")
        arguments = (operation.source,) if operation.kind == "broadcast" else ()
        try:
            zeros = torch.zeros(operation.shape, dtype=operation.dtype, device=self._device)
            getattr(self, operation.kind)(zeros, *arguments)
        except RanksFailed:
            raise
        except (RuntimeError, MemoryError) as error:
            raise CollectiveError(f"rank {self.rank} could not complete a step: {first_line(error)}") from None

    def _take(self, operation: Operation) -> None:
        """Take an operation off the expected ones before it runs: a failed operation cannot be run again."""
        if self._expected is not None:
            expected = self._expected.popleft() if self._expected else None
            assert operation == expected, f"the operation must be {expected}, got {operation}"

    def _run(self, operation: Operation, submit: Callable[[], dist.Work]) -> None:
        self._take(operation)
        try:
            submit().wait()
        except RuntimeError as error:
            self._expected = None  # further operations would fail too, each after its timeout
            raise RanksFailed(f"rank {self.rank} lost another rank: {str(error).partition(chr(10))[0]}") from None
