"""CUDA graphs: the hundreds of kernels of a step are launched as one.

A graph runs on fixed addresses with fixed shapes, so there is one for each of a few sizes, and a step is padded to the
next size. Padding writes its keys and values to a scratch block that no sequence owns, and sees nothing else.

`loading.py` decides whether graphs are captured, `ModelRunner.run` which steps use one, and `memory.py` measures their
memory.
"""

from collections.abc import Callable

import torch


class Graphs:
    """Captures functions that share their memory: what one computed is valid until the next is replayed."""

    def __init__(self, device: torch.device):
        self._device, self._pool = device, None
        # A stream of this device, not of the process's first.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """A function that replays `compute`, which reads and writes tensors that stay; capture the largest first."""
        compute()  # compiles kernels and allocates what libraries keep, which a capture must not
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        self._pool = graph.pool()
        return graph.replay
