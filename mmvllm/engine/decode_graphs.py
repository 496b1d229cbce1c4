"""Decode steps as CUDA graphs: the hundreds of kernels of a step are launched as one.

A graph runs on fixed addresses with a fixed number of sequences, so there is one for each of a few sizes, all with the
same input buffers, and a step is padded to the next size. Padding rows write their keys and values to a scratch block
that no sequence owns, and see one key there.
"""

import logging
import time
from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from mmvllm.engine.device_rows import DeviceRows
from mmvllm.engine.step_inputs import StepInputs
from mmvllm.models.interface import Model

logger = logging.getLogger(__name__)

LARGEST = 256  # sequences; beyond, launching takes a small part of a step


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences to capture: dense where a step is short, and at most 16 rows or a half too many."""
    largest = min(max_num_seqs, LARGEST)
    return sorted({*(size for size in (1, 2, 4, 8, *range(16, largest, 16)) if size < largest), largest})


def graphs_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Bytes that the graphs take beside the inputs: their logits, three times at most.

    What the layers need for so few rows is small in comparison.
    """
    return 12 * graph_sizes(max_num_seqs)[-1] * vocab_size


class DecodeGraphs:
    """Captures at construction; `run` replays a step that `fits`."""

    def __init__(
        self,
        model: Model,
        kv_cache: Tensor,
        no_rows: Tensor,
        rows: DeviceRows,
        max_num_seqs: int,
        max_model_len: int,
    ):
        self.sizes = graph_sizes(max_num_seqs)
        self._model, self._kv_cache, self._no_rows, self._rows = model, kv_cache, no_rows, rows
        self._max_model_len = max_model_len  # the context length that graphs are captured for
        largest, device = self.sizes[-1], kv_cache.device
        self._decodes = torch.empty(3 * largest, dtype=torch.int32, device=device)
        self._logits = torch.empty(largest, model.config.vocab_size, dtype=torch.float32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(device) if kv_cache.is_cuda else None
        start = time.perf_counter()
        for size in tqdm(reversed(self.sizes), "CUDA graphs", len(self.sizes), disable=None, leave=False):
            self._fill(np.empty((3, 0), dtype=np.int32), size)
            self._capture(size)  # the largest first: its memory then serves the others too
        logger.info("captured %d CUDA graphs in %.2f s", len(self.sizes), time.perf_counter() - start)

    def fits(self, inputs: StepInputs) -> bool:
        """Whether every sequence of the step decodes, and there are not too many."""
        return inputs.prefills is None and inputs.num_decodes <= self.sizes[-1]

    def run(self, decodes: np.ndarray) -> tuple[Tensor, Tensor]:
        """Logits (D, V) and `samples` of sequences that decode, (3, D) as in `StepInputs`; valid until the next run."""
        D = decodes.shape[1]
        size = self.sizes[bisect_left(self.sizes, D)]
        self._fill(decodes, size)
        self._replay(size)
        return self._logits[:D], self._decodes[: 3 * size].view(3, size)[:2, :D]

    def _capture(self, size: int) -> None:
        self._compute(size)  # compiles kernels and allocates what libraries keep, which a capture must not
        torch.cuda.synchronize(self._kv_cache.device)
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[self.sizes[-1]].pool() if self._graphs else None
        # A stream of this device, not of the process's first; other threads may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            self._compute(size)
        self._graphs[size] = graph

    def _replay(self, size: int) -> None:
        self._graphs[size].replay()

    def _compute(self, size: int) -> None:
        decodes = self._decodes[: 3 * size].view(3, size)
        batch = self._rows.decode_batch(decodes, (self._max_model_len,) * size)
        self._logits[:size] = self._model(batch, self._no_rows, self._kv_cache)

    def _fill(self, decodes: np.ndarray, size: int) -> None:
        """Copy what sequences decode into the graph's input, with padding behind."""
        padded = torch.empty(3, size, dtype=torch.int32, pin_memory=self._kv_cache.is_cuda)
        D = decodes.shape[1]
        padded[:, :D] = torch.from_numpy(decodes)
        padded[:, D:] = torch.tensor(self._rows.padding, dtype=torch.int32)[:, None]
        self._decodes[: 3 * size].view(3, size).copy_(padded, non_blocking=True)
