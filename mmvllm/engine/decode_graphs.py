"""Decode steps as CUDA graphs: the hundreds of kernels of a step are launched as one.

A graph runs on fixed addresses with a fixed number of sequences, so there is one for each of a few sizes, all with the
same input buffers, and a step is padded to the next size. Padding rows write their keys and values to a scratch block
that no sequence owns, and see one key there.
"""

import logging
import time
from bisect import bisect_left

import torch
from torch import Tensor
from tqdm.auto import tqdm

from mmvllm.batch import Batch, decode_buffers, first_sequences
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
    """Captures at construction; `run` replays a batch that `fits`."""

    def __init__(self, model: Model, kv_cache: Tensor, no_rows: Tensor, max_num_seqs: int, max_model_len: int):
        self.sizes = graph_sizes(max_num_seqs)
        self._model, self._kv_cache, self._no_rows = model, kv_cache, no_rows
        self._scratch_block = kv_cache.shape[2] - 1
        largest = self.sizes[-1]
        self._inputs = decode_buffers(largest, max_model_len, kv_cache.shape[3], self._scratch_block, kv_cache.device)
        vocab_size = model.config.vocab_size
        self._logits = torch.empty(largest, vocab_size, dtype=torch.float32, device=kv_cache.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(kv_cache.device) if kv_cache.is_cuda else None
        start = time.perf_counter()
        for size in tqdm(reversed(self.sizes), "CUDA graphs", len(self.sizes), disable=None, leave=False):
            self._capture(size)  # the largest first: its memory then serves the others too
        logger.info("captured %d CUDA graphs in %.2f s", len(self.sizes), time.perf_counter() - start)

    def fits(self, batch: Batch) -> bool:
        """Whether every sequence of the batch decodes, and there are not too many."""
        S = len(batch.query_lens)
        all_decode = len(batch.input_ids) == len(batch.sample_at) == S and not batch.row_spans
        return all_decode and self.sizes[-1] >= S

    def run(self, batch: Batch) -> Tensor:
        """Logits (S, V) of a batch that fits, valid until the next run."""
        S = len(batch.query_lens)
        size = self.sizes[bisect_left(self.sizes, S)]
        self._fill(batch, size)
        self._replay(size)
        return self._logits[:S]

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
        self._logits[:size] = self._model(first_sequences(self._inputs, size), self._no_rows, self._kv_cache)

    def _fill(self, batch: Batch, size: int) -> None:
        """Copy the batch into the buffers; rows of a longer batch between its end and `size` become padding."""
        S, blocks, into = len(batch.query_lens), batch.block_table.shape[1], self._inputs
        scratch_slot = self._scratch_block * self._kv_cache.shape[3]
        for name, padding in (("input_ids", 0), ("slot_mapping", scratch_slot), ("kv_lens", 1)):
            buffer = getattr(into, name)
            buffer[:S] = getattr(batch, name)
            buffer[S:size] = padding
        into.positions[:, :S] = batch.positions
        into.block_table[:S, :blocks] = batch.block_table
        into.block_table[S:size, 0] = self._scratch_block
