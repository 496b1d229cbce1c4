"""The device's state of running sequences, so that a decode step copies three numbers per sequence.

A running sequence has a request index. Work is ordered in the device's stream: an index that is given to another
sequence is written after the last step of its former one.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmvllm.layers.batch import AdapterRows, Batch
from mmvllm.scheduler.step_inputs import AdapterTokens, MixedStep, StepInputs
from mmvllm.utils.transfer import copy_packed


class InputBatch:
    """Tensors that change in place, by request index; the last index is for padding.

    Args:
        max_blocks: of one sequence.
        scratch_block: what padding writes to.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, scratch_block: int, device: torch.device):
        self.block_size, self.device = block_size, device
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.position_deltas = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(max_num_seqs + 1, max_blocks, dtype=torch.int32, device=device)
        self.block_table[-1] = scratch_block
        self._counts = torch.arange(max_num_seqs + 2, dtype=torch.int32, device=device)
        self._places = torch.arange(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.padding = (max_num_seqs, 1, scratch_block)  # what `StepInputs.decodes` has of a sequence

    def decode_batch(self, decodes: Tensor, context_lens: tuple[int, ...]) -> Batch:
        """The batch of sequences that all decode: decodes (3, D) int32 on the device, as in `StepInputs`.

        It reads nothing on the host but `context_lens`, upper limits of the KV lengths, and can be captured in a graph.
        """
        D = decodes.shape[1]
        req_indices, input_ids, positions, slot_mapping = self._decode_tokens(decodes)
        return Batch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            cu_seqlens_q=self._counts[: D + 1],
            kv_lens=decodes[1],
            cu_seqlens_k=None,
            block_table=self._block_tables(req_indices, max(context_lens)),
            logits_indices=self._places[:D],
            mm_token_indices=self._places[:0],
            query_lens=(1,) * D,
            context_lens=context_lens,
            num_decodes=D,
        )

    def batch(self, inputs: StepInputs) -> tuple[Batch, Tensor]:
        """The batch of a step, and its `samples` on the device; one copy to the device."""
        if inputs.mixed is None:
            (decodes,) = copy_packed([inputs.decodes], self.device)
            batch = self.decode_batch(decodes, tuple(inputs.decodes[1].tolist()))
            return self._with_adapters(batch, inputs.adapters), decodes[:2]
        tensors = MixedStep(*copy_packed(inputs.mixed, self.device))
        self.add_prefills(tensors)
        query_lens = np.diff(inputs.mixed.cu_seqlens_q)
        batch = self.mixed_batch(tensors, tuple(query_lens.tolist()), tuple(inputs.mixed.kv_lens.tolist()))
        return self._with_adapters(batch, inputs.adapters), tensors.samples

    def _with_adapters(self, batch: Batch, adapters: AdapterTokens | None) -> Batch:
        if adapters is None:
            return batch
        tokens, ends = copy_packed([adapters.tokens, adapters.ends], self.device)
        return replace(batch, adapters=AdapterRows(tokens, ends, adapters.slots))

    def add_prefills(self, new: MixedStep[Tensor]) -> None:
        """Keep what later steps need of the sequences of prefills; not captured: their number of blocks varies."""
        self.position_deltas[new.req_indices] = new.position_deltas
        self.block_table[new.blocks[0], new.blocks[1]] = new.blocks[2].int()

    def mixed_batch(self, step: MixedStep[Tensor], query_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> Batch:
        """The batch of a step with prefills, whose prefills were added (`add_prefills`).

        It reads nothing on the host but `query_lens` and `context_lens`, and can be captured in a graph: there, they
        are upper limits of what follows the D sequences that decode.
        """
        req_indices, *decoded = self._decode_tokens(step.decodes)
        return Batch(
            input_ids=torch.cat([decoded[0], step.input_ids]),
            positions=torch.cat([decoded[1], step.positions], dim=1),
            slot_mapping=torch.cat([decoded[2], step.slot_mapping]),
            cu_seqlens_q=step.cu_seqlens_q,
            kv_lens=step.kv_lens,
            cu_seqlens_k=step.cu_seqlens_k,
            block_table=self._block_tables(torch.cat([req_indices, step.req_indices]), max(context_lens)),
            logits_indices=step.logits_indices,
            mm_token_indices=step.mm_token_indices,
            query_lens=query_lens,
            context_lens=context_lens,
            num_decodes=step.decodes.shape[1],
        )

    def _decode_tokens(self, decodes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Request indices, ids, positions (3, D) and slots of decoded tokens; writes the sequences' last blocks."""
        req_indices, kv_lens, last_blocks = decodes.long()
        at = kv_lens - 1
        self.block_table[req_indices, at // self.block_size] = decodes[2]
        positions = (at + self.position_deltas[req_indices]).repeat(3, 1)
        return (
            req_indices,
            self.last_tokens[req_indices],
            positions,
            last_blocks * self.block_size + at % self.block_size,
        )

    def _block_tables(self, req_indices: Tensor, max_kv_len: int) -> Tensor:
        """(S, max_blocks) of the sequences at these request indices."""
        return self.block_table[:, : -(-max_kv_len // self.block_size)].index_select(0, req_indices)
