"""Small steps with prefills as CUDA graphs, by number of tokens and of sequences that decode.

What a graph has room for is filled up with sequences that decode into the scratch block, prefills without a token, and
one prefill of the tokens that are left, of which there is at least one: unused embeddings go to the last token.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from mmvllm.kernels.common.kv_cache import KVCache
from mmvllm.models.interface import Model
from mmvllm.scheduler.step_inputs import MixedStep, StepInputs, running_sum
from mmvllm.utils.transfer import copy_packed
from mmvllm.worker.cuda_graphs import Graphs
from mmvllm.worker.input_batch import InputBatch

NUM_TOKENS = (128, 256, 512)  # of a step, padding included; launching takes a small part of larger ones
NUM_DECODES = (0, 16, 64, 128, 256)  # at most half of a step's tokens
MAX_PREFILLS = 8  # sequences


class StepSize(NamedTuple):
    """What a graph has room for: all tokens of a step, and those that sequences decode."""

    num_tokens: int
    num_decodes: int


def step_sizes(max_num_seqs: int, max_model_len: int) -> list[StepSize]:
    """Sizes to capture, the smallest first; the padding of a step is no longer than a sequence may be."""
    tokens = {min(size, max_model_len) for size in NUM_TOKENS}
    decodes = {min(size, max_num_seqs) for size in NUM_DECODES}
    return sorted(StepSize(N, D) for N in tokens for D in decodes if 1 < N >= 2 * D)


class MixedGraphs:
    """Captures at construction; `run` replays a step that `fits`.

    Args:
        logits: (R, V), with MAX_PREFILLS more rows than sequences decode at most, written by each graph; of
            ranks other than 0, their first columns.
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
        self.sizes = step_sizes(max_num_seqs, max_model_len)
        self._model, self._kv_cache, self._input_batch, self._logits = model, kv_cache, input_batch, logits
        self._max_model_len = max_model_len
        largest = max((size.num_tokens for size in self.sizes), default=0)
        num_mm_embeds = largest if model.config.vision is not None else 0
        self._mm_embeds = logits.new_zeros(num_mm_embeds, model.config.mm_embed_size)
        self._inputs = self._make_inputs()
        self._replays, self._tensors = {}, {}
        for size in tqdm(self.sizes[::-1], "CUDA graphs of mixed steps", disable=None, leave=False):
            self._fill(_empty_step(), size)
            self._replays[size] = graphs.capture(partial(self._compute, size))

    def fits(self, inputs: StepInputs) -> bool:
        """Whether there is a prefill, and a graph with room for the step."""
        return inputs.mixed is not None and self._size(inputs) is not None

    def run(self, inputs: StepInputs, mm_embeds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (R, V) and `StepInputs.samples` on the device, valid until the next run.

        mm_embeds, each (M, mm_embed_size), follow each other at `MixedStep.mm_token_indices`.
        """
        size, step = self._size(inputs), inputs.mixed
        if mm_embeds:
            torch.cat(mm_embeds, out=self._mm_embeds[: len(step.mm_token_indices)])
        self._fill(step, size)
        self._input_batch.add_prefills(self._tensors[size])
        self._replays[size]()
        R = step.samples.shape[1]
        return self._logits[:R], self._tensors[size].samples[:, :R]

    def _size(self, inputs: StepInputs) -> StepSize | None:
        if len(inputs.mixed.req_indices) > MAX_PREFILLS:
            return None
        D, P = inputs.num_decodes, len(inputs.mixed.input_ids)
        fitting = (size for size in self.sizes if size.num_decodes >= D and size.num_tokens - size.num_decodes > P)
        return next(fitting, None)

    def _compute(self, size: StepSize) -> None:
        (N, D), tensors = size, self._tensors[size]
        query_lens = (*[1] * D, *[0] * MAX_PREFILLS, N - D)
        batch = self._input_batch.mixed_batch(tensors, query_lens, (self._max_model_len,) * len(query_lens))
        logits = self._model(batch, self._mm_embeds[: len(tensors.mm_token_indices)], self._kv_cache)
        self._logits[: len(logits), : logits.shape[1]] = logits

    def _fill(self, step: MixedStep[np.ndarray], size: StepSize) -> None:
        """Copy a step into the graph's input, with padding; only its blocks are not where they were before."""
        self._tensors[size] = MixedStep(*copy_packed(self._padded(step, size), self._kv_cache.device, self._inputs))

    def _make_inputs(self) -> Tensor:
        """Bytes for the inputs of any step: of the size that needs most, which is not the last, with all blocks."""
        padded = (self._padded(_empty_step(), size) for size in self.sizes)
        num_bytes = max((sum(array.nbytes + 8 for array in arrays) for arrays in padded), default=0)
        num_bytes += 3 * 8 * MAX_PREFILLS * self._input_batch.block_table.shape[1]
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._kv_cache.device)

    def _padded(self, step: MixedStep[np.ndarray], size: StepSize) -> MixedStep[np.ndarray]:
        """The step with as many tokens, sequences, embeddings and logits as the graph has."""
        (N, D), input_batch = size, self._input_batch
        own, left = step.decodes.shape[1], N - D - len(step.input_ids)
        req_index, _, scratch_block = input_batch.padding
        decodes = _filled(step.decodes, D, np.array(input_batch.padding)[:, None])
        slots = scratch_block * input_batch.block_size + np.arange(left) % input_batch.block_size
        num_mm_embeds = N - D if len(self._mm_embeds) else 0
        query_lens = _lens(np.ones(D), np.diff(step.cu_seqlens_q)[own:], left)
        kv_lens = _lens(decodes[1], step.kv_lens[own:], left)
        return MixedStep(
            decodes=decodes,
            req_indices=_filled(step.req_indices, MAX_PREFILLS + 1, req_index),
            position_deltas=_filled(step.position_deltas, MAX_PREFILLS + 1, 0),
            input_ids=_filled(step.input_ids, N - D, 0),
            positions=_filled(step.positions, N - D, 0),
            slot_mapping=np.concatenate([step.slot_mapping, slots]),
            mm_token_indices=_filled(step.mm_token_indices + D - own, num_mm_embeds, N - 1),
            logits_indices=_filled(
                step.logits_indices + (step.logits_indices >= own) * (D - own), D + MAX_PREFILLS, N - 1
            ),
            samples=_filled(step.samples, D + MAX_PREFILLS, 0),
            kv_lens=kv_lens,
            cu_seqlens_q=running_sum(query_lens),
            cu_seqlens_k=running_sum(kv_lens),
            blocks=step.blocks,
        )


def _empty_step() -> MixedStep[np.ndarray]:
    none, none3, no_lens = np.empty(0, dtype=np.int64), np.empty((3, 0), dtype=np.int64), np.empty(0, dtype=np.int32)
    return MixedStep(
        decodes=none3.astype(np.int32),
        req_indices=none,
        position_deltas=none,
        input_ids=none,
        positions=none3,
        slot_mapping=none,
        mm_token_indices=none,
        logits_indices=none,
        samples=np.empty((2, 0), dtype=np.int32),
        kv_lens=no_lens,
        cu_seqlens_q=running_sum(no_lens),
        cu_seqlens_k=running_sum(no_lens),
        blocks=none3,
    )


def _filled(array: np.ndarray, length: int, value: int | np.ndarray) -> np.ndarray:
    """The array with `value` behind, up to this length of its last axis."""
    filled = np.empty((*array.shape[:-1], length), dtype=array.dtype)
    filled[..., : array.shape[-1]] = array
    filled[..., array.shape[-1] :] = value
    return filled


def _lens(of_decodes: np.ndarray, of_prefills: np.ndarray, left: int) -> np.ndarray:
    return np.concatenate([of_decodes, _filled(of_prefills, MAX_PREFILLS, 0), [left]]).astype(np.int32)
