"""Decode steps as CUDA graphs, by number of sequences; padding rows see one key."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from mmvllm.kernels.common.kv_cache import KVCache
from mmvllm.models.interface import Model
from mmvllm.scheduler.step_inputs import StepInputs
from mmvllm.worker.cuda_graphs import Graphs
from mmvllm.worker.input_batch import InputBatch

LARGEST = 256  # sequences; beyond, launching takes a small part of a step


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences to capture: dense where a step is short, and at most 16 rows or a half too many."""
    largest = min(max_num_seqs, LARGEST)
    return sorted({*(size for size in (1, 2, 4, 8, *range(16, largest, 16)) if size < largest), largest})


class DecodeGraphs:
    """Captures at construction; `run` replays a step that `fits`.

    Args:
        logits: (R, V), with as many rows as there are sequences in the largest graph, written by each of them.
            On ranks other than 0, their first columns.
        max_model_len: the context length that graphs are captured for.
    """

    def __init__(
        self,
        graphs: Graphs,
        model: Model,
        kv_cache: KVCache,
        input_batch: InputBatch,
        logits: Tensor,
        max_num_seqs: int,
        max_model_len: int,
    ):
        self.sizes = graph_sizes(max_num_seqs)
        self._model, self._kv_cache, self._input_batch, self._logits = model, kv_cache, input_batch, logits
        self._max_model_len = max_model_len
        self._no_embeds = logits.new_empty(0, model.config.mm_embed_size)
        self._decodes = torch.empty(3 * self.sizes[-1], dtype=torch.int32, device=kv_cache.device)
        self._replays = {}
        for size in tqdm(self.sizes[::-1], "CUDA graphs of decode steps", disable=None, leave=False):
            self._fill(np.empty((3, 0), dtype=np.int32), size)
            self._replays[size] = graphs.capture(partial(self._compute, size))

    def fits(self, inputs: StepInputs) -> bool:
        """Whether every sequence of the step decodes, and there are not too many."""
        return inputs.mixed is None and inputs.num_decodes <= self.sizes[-1]

    def run(self, inputs: StepInputs, mm_embeds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (D, V) and `StepInputs.samples` on the device, valid until the next run; `mm_embeds` is empty."""
        D = inputs.num_decodes
        size = self.sizes[bisect_left(self.sizes, D)]
        self._fill(inputs.decodes, size)
        self._replays[size]()
        return self._logits[:D], self._decodes[: 3 * size].view(3, size)[:2, :D]

    def _compute(self, size: int) -> None:
        decodes = self._decodes[: 3 * size].view(3, size)
        batch = self._input_batch.decode_batch(decodes, (self._max_model_len,) * size)
        logits = self._model(batch, self._no_embeds, self._kv_cache)
        self._logits[:size, : logits.shape[1]] = logits

    def _fill(self, decodes: np.ndarray, size: int) -> None:
        """Copy what sequences decode into the graph's input, with padding behind."""
        padded = torch.empty(3, size, dtype=torch.int32, pin_memory=self._decodes.is_cuda)
        D = decodes.shape[1]
        padded[:, :D] = torch.from_numpy(decodes)
        padded[:, D:] = torch.tensor(self._input_batch.padding, dtype=torch.int32)[:, None]
        self._decodes[: 3 * size].view(3, size).copy_(padded, non_blocking=True)
