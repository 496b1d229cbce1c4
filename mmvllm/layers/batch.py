"""The packed tensors of one forward pass, which a model takes.

Letters in shapes, everywhere: N tokens in a step, S sequences, T tokens of a sequence, H query heads, K KV heads,
D head size, C hidden size, P patches, M vision embeddings, V vocabulary, R sampled tokens, Q tokens with
prompt outputs, I inner size of an MLP, E experts, k experts of a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The LoRA adapters of the rows of a layer's input; rows without an adapter are not listed."""

    rows: Tensor  # (L,) int64, sorted by the slots of their adapters
    ends: Tensor  # (slots,) int32, where the rows of each slot end
    slots: frozenset[int]  # slots that have rows, on the host

    @classmethod
    def alone(cls, slot: int, num_slots: int, num_rows: int, device: torch.device) -> "AdapterRows":
        """Assign all rows to one slot."""
        ends = torch.full((num_slots,), num_rows, dtype=torch.int32, device=device)
        ends[:slot] = 0
        return cls(torch.arange(num_rows, device=device), ends, frozenset((slot,)))

    def among(self, start: int, end: int) -> "AdapterRows":
        """Select rows [start, end), and count them from `start`."""
        is_among = (start <= self.rows) & (self.rows < end)
        counts = torch.cat([is_among.new_zeros(1), is_among]).cumsum(0, dtype=torch.int32)
        return AdapterRows(self.rows[is_among] - start, counts[self.ends.long()], self.slots)


@dataclass(frozen=True, slots=True)
class Batch:
    """The chunks of one step, packed end to end; lengths are also on the host, to avoid synchronization.

    0 | sequence 1 |  sequence 2 (a chunk)  |        tokens along N; sequence 0 decodes
    cu_seqlens_q = [0, 1, 11, 36]                    sequence s owns tokens [cu[s], cu[s + 1])
    kv_lens      = [412, 10, 90]                     keys that the last token of each may see
    """

    input_ids: Tensor  # (N,) int64
    positions: Tensor  # (3, N) int64: time, height, width; three equal rows for text
    slot_mapping: Tensor  # (N,) int64, the flat KV slot that each token writes: block * block_size + offset
    cu_seqlens_q: Tensor  # (S + 1,) int32
    kv_lens: Tensor  # (S,) int32
    cu_seqlens_k: Tensor | None  # (S + 1,) int32, running sum of kv_lens; None where every sequence decodes
    block_table: Tensor  # (S, max_blocks) int32; entries after a sequence's blocks are arbitrary
    logits_indices: Tensor  # (R + Q,) int64, tokens whose final hidden states are computed: sampled ones first
    mm_token_indices: Tensor  # (M,) int64, placeholder token that each embedding belongs to
    query_lens: tuple[int, ...]  # on the host
    context_lens: tuple[int, ...]  # kv_lens, on the host; upper limits of them in a CUDA graph
    num_decodes: int = 0  # the first sequences, with one token each; later sequences may also have one
    adapters: AdapterRows | None = None  # of the tokens; None if no sequence uses an adapter

    def __post_init__(self) -> None:
        N, S = len(self.input_ids), len(self.kv_lens)
        assert self.positions.shape == (3, N), f"positions {tuple(self.positions.shape)}, want (3, {N})"
        assert self.slot_mapping.shape == (N,), f"slot_mapping {tuple(self.slot_mapping.shape)}, want ({N},)"
        assert self.cu_seqlens_q.shape == (S + 1,), f"cu_seqlens_q {tuple(self.cu_seqlens_q.shape)}, want ({S + 1},)"
        assert sum(self.query_lens) == N, f"query_lens sum to {sum(self.query_lens)}, want {N}"


def prompt_batch(num_tokens: int, num_logits: int, block_size: int, device: torch.device) -> Batch:
    """Return one text prompt in the first blocks of the cache, with logits for its first `num_logits` tokens."""
    tokens = torch.arange(num_tokens, device=device)
    ends = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    return Batch(
        input_ids=torch.zeros_like(tokens),
        positions=tokens.repeat(3, 1),
        slot_mapping=tokens,
        cu_seqlens_q=ends,
        kv_lens=ends[1:],
        cu_seqlens_k=ends,
        block_table=torch.arange(-(-num_tokens // block_size), dtype=torch.int32, device=device)[None],
        logits_indices=tokens[:num_logits],
        mm_token_indices=tokens[:0],
        query_lens=(num_tokens,),
        context_lens=(num_tokens,),
    )
