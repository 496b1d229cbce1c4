"""What the device keeps of each running sequence, so that a decode step copies three numbers for it.

A sequence has a row while it runs. Work is ordered in the device's stream: a row that is given to another sequence is
written after the last step of its former one.
"""

import numpy as np
import torch
from torch import Tensor

from mmvllm.batch import Batch
from mmvllm.engine.step_inputs import Prefills, StepInputs
from mmvllm.transfer import copy_together


class DeviceRows:
    """Tensors that change in place; the last row is for padding.

    Args:
        max_blocks: of one sequence.
        scratch_block: what padding writes to.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, scratch_block: int, device: torch.device):
        self.block_size, self.device = block_size, device
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.position_deltas = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(max_num_seqs + 1, max_blocks, dtype=torch.int32, device=device)
        self._counts = torch.arange(max_num_seqs + 2, dtype=torch.int32, device=device)
        self._places = torch.arange(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.padding = (max_num_seqs, 1, scratch_block)  # what `StepInputs.decodes` has of a sequence

    def decode_batch(self, decodes: Tensor, context_lens: tuple[int, ...]) -> Batch:
        """The batch of sequences that all decode: decodes (3, D) int32 on the device, as in `StepInputs`.

        It reads nothing on the host but `context_lens`, upper limits of the KV lengths, and can be captured in a graph.
        """
        D = decodes.shape[1]
        rows, input_ids, positions, slot_mapping = self._decode_tokens(decodes)
        return Batch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            cu_seqlens_q=self._counts[: D + 1],
            kv_lens=decodes[1],
            cu_seqlens_k=None,
            block_table=self._block_tables(rows, max(context_lens)),
            sample_at=self._places[:D],
            image_at=self._places[:0],
            query_lens=(1,) * D,
            context_lens=context_lens,
            num_decodes=D,
        )

    def batch(self, inputs: StepInputs) -> tuple[Batch, Tensor]:
        """The batch of a step, and its `samples` on the device; one copy to the device."""
        context_lens = tuple(inputs.decodes[1].tolist())
        if inputs.prefills is None:
            (decodes,) = copy_together([inputs.decodes], self.device)
            return self.decode_batch(decodes, context_lens), decodes[:2]
        return self._mixed_batch(inputs, inputs.prefills, context_lens)

    def _mixed_batch(self, inputs: StepInputs, new: Prefills, decode_lens: tuple[int, ...]) -> tuple[Batch, Tensor]:
        D = inputs.num_decodes
        query_lens = np.concatenate([np.ones(D, dtype=np.int32), new.query_lens])
        kv_lens = np.concatenate([inputs.decodes[1], new.kv_lens])
        ends_q, ends_k = query_lens.cumsum(dtype=np.int32), kv_lens.cumsum(dtype=np.int32)
        wants_token = np.concatenate([np.ones(D, dtype=bool), new.samples])
        decodes, rows, deltas, blocks, ids, positions, slots, image_at, sample_at, samples, *lengths = copy_together(
            [
                *(inputs.decodes, new.rows, new.position_deltas, new.blocks),
                *(new.input_ids, new.positions, new.slot_mapping, new.image_at + D),
                *(ends_q[wants_token].astype(np.int64) - 1, inputs.samples),
                *(np.concatenate([[np.int32(0)], ends_q]), kv_lens, np.concatenate([[np.int32(0)], ends_k])),
            ],
            self.device,
        )
        cu_seqlens_q, kv_lens, cu_seqlens_k = lengths
        self.position_deltas[rows] = deltas
        self.block_table[blocks[0], blocks[1]] = blocks[2].int()
        decode_rows, *tokens = self._decode_tokens(decodes)
        context_lens = (*decode_lens, *new.kv_lens.tolist())
        batch = Batch(
            input_ids=torch.cat([tokens[0], ids]),
            positions=torch.cat([tokens[1], positions], dim=1),
            slot_mapping=torch.cat([tokens[2], slots]),
            cu_seqlens_q=cu_seqlens_q,
            kv_lens=kv_lens,
            cu_seqlens_k=cu_seqlens_k,
            block_table=self._block_tables(torch.cat([decode_rows, rows]), max(context_lens)),
            sample_at=sample_at,
            image_at=image_at,
            query_lens=tuple(query_lens.tolist()),
            context_lens=context_lens,
            num_decodes=D,
        )
        return batch, samples

    def _decode_tokens(self, decodes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows, ids, positions (3, D) and slots of the tokens that sequences decode; their last blocks are kept."""
        rows, kv_lens, last_blocks = decodes.long()
        at = kv_lens - 1
        self.block_table[rows, at // self.block_size] = decodes[2]
        positions = (at + self.position_deltas[rows]).repeat(3, 1)
        return rows, self.last_tokens[rows], positions, last_blocks * self.block_size + at % self.block_size

    def _block_tables(self, rows: Tensor, max_kv_len: int) -> Tensor:
        """(S, max_blocks) of the sequences in these rows."""
        return self.block_table[:, : -(-max_kv_len // self.block_size)].index_select(0, rows)
