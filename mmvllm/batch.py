"""One forward pass as packed tensors. Every `Batch` is made by one of the functions in this file.

Letters used for shapes everywhere: N tokens in a step, S sequences, T tokens of a sequence, H query heads, K KV heads,
D head size, C hidden size, P patches, M merged image rows, V vocabulary, R rows that want a token, I inner
size of an MLP, E experts, k experts of a token.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmvllm.inputs import MediaItem
from mmvllm.transfer import to_device


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows [first, last) of an encoded item, needed in this step."""

    digest: bytes
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The chunks of one step, packed end to end. Host copies of lengths spare the device a round trip.

    sequence 0 |  sequence 1 (a chunk)  | 2 |        tokens along N
    cu_seqlens_q = [0, 10, 35, 36]                   sequence s owns tokens [cu[s], cu[s + 1])
    kv_lens      = [10, 90, 412]                     keys that the last token of each may see
    """

    input_ids: Tensor  # (N,) int64
    positions: Tensor  # (3, N) int64: time, height, width; three equal rows for text
    slot_mapping: Tensor  # (N,) int64, the flat KV slot that each token writes: block * block_size + offset
    cu_seqlens_q: Tensor  # (S + 1,) int32
    kv_lens: Tensor  # (S,) int32
    cu_seqlens_k: Tensor  # (S + 1,) int32, running sum of kv_lens
    block_table: Tensor  # (S, max_blocks) int32, padded with 0
    sample_at: Tensor  # (R,) int64, tokens whose logits are wanted: none of an unfinished prompt
    image_at: Tensor  # (M,) int64, token that each image row replaces
    block_copies: Tensor  # (2, number) int64: source and destination blocks, copied before anything is written
    query_lens: tuple[int, ...]  # on the host
    context_lens: tuple[int, ...]  # kv_lens, on the host
    num_decodes: int = 0  # the first sequences, with one token each; more such sequences may follow
    row_spans: tuple[RowSpan, ...] = ()  # where the M image rows come from
    new_items: tuple[MediaItem, ...] = ()  # to encode in this step
    freed_digests: tuple[bytes, ...] = ()  # items whose rows the encoder cache has dropped since the last step

    def __post_init__(self) -> None:
        N, S = len(self.input_ids), len(self.kv_lens)
        assert self.positions.shape == (3, N), f"positions {tuple(self.positions.shape)}, want (3, {N})"
        assert self.slot_mapping.shape == (N,), f"slot_mapping {tuple(self.slot_mapping.shape)}, want ({N},)"
        assert self.cu_seqlens_q.shape == (S + 1,), f"cu_seqlens_q {tuple(self.cu_seqlens_q.shape)}, want ({S + 1},)"
        assert sum(self.query_lens) == N, f"query_lens sum to {sum(self.query_lens)}, want {N}"


def pack(
    input_ids: Tensor | np.ndarray,
    *,
    positions: np.ndarray,
    slot_mapping: np.ndarray,
    query_lens: list[int],
    kv_lens: list[int],
    block_table: np.ndarray,
    sample_at: list[int] | np.ndarray,
    device: torch.device,
    image_at: np.ndarray | None = None,
    block_copies: list[tuple[int, int]] = (),
    row_spans: tuple[RowSpan, ...] = (),
    new_items: tuple[MediaItem, ...] = (),
    freed_digests: tuple[bytes, ...] = (),
) -> Batch:
    """A batch from host arrays; `input_ids` may be on the device already."""

    def on_device(values, dtype: type) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values, dtype=dtype)), device)

    return Batch(
        input_ids=input_ids if isinstance(input_ids, Tensor) else on_device(input_ids, np.int64),
        positions=on_device(positions, np.int64),
        slot_mapping=on_device(slot_mapping, np.int64),
        cu_seqlens_q=on_device(np.cumsum([0, *query_lens]), np.int32),
        kv_lens=on_device(kv_lens, np.int32),
        cu_seqlens_k=on_device(np.cumsum([0, *kv_lens]), np.int32),
        block_table=on_device(block_table, np.int32),
        sample_at=on_device(sample_at, np.int64),
        image_at=on_device(np.empty(0) if image_at is None else image_at, np.int64),
        block_copies=on_device(np.array(block_copies, dtype=np.int64).reshape(-1, 2).T, np.int64),
        query_lens=tuple(query_lens),
        context_lens=tuple(kv_lens),
        row_spans=row_spans,
        new_items=new_items,
        freed_digests=freed_digests,
    )


def prompt_batch(num_tokens: int, num_logits: int, block_size: int, device: torch.device) -> Batch:
    """One text prompt in the first blocks of the cache, with logits of its first `num_logits` tokens."""
    tokens = np.arange(num_tokens)
    return pack(
        np.zeros(num_tokens),
        positions=np.tile(tokens, (3, 1)),
        slot_mapping=tokens,
        query_lens=[num_tokens],
        kv_lens=[num_tokens],
        block_table=np.arange(-(-num_tokens // block_size))[None],
        sample_at=tokens[:num_logits],
        device=device,
    )


def decode_buffers(
    num_seqs: int, max_model_len: int, block_size: int, scratch_block: int, device: torch.device
) -> Batch:
    """Fixed buffers for decode steps of up to `num_seqs` sequences, filled with padding.

    Padding rows see one key, in `scratch_block`, which no sequence owns. The maximum context length is on the host,
    where a CUDA graph keeps what it was captured with.
    """
    batch = pack(
        np.zeros(num_seqs),
        positions=np.zeros((3, num_seqs)),
        slot_mapping=np.full(num_seqs, scratch_block * block_size),
        query_lens=[1] * num_seqs,
        kv_lens=[1] * num_seqs,
        block_table=np.full((num_seqs, -(-max_model_len // block_size)), scratch_block),
        sample_at=np.arange(num_seqs),
        device=device,
    )
    return replace(batch, context_lens=(max_model_len,) * num_seqs)


def first_sequences(buffers: Batch, num_seqs: int) -> Batch:
    """Views of the first `num_seqs` sequences of decode buffers."""
    per_sequence = ("input_ids", "slot_mapping", "kv_lens", "block_table", "sample_at", "query_lens", "context_lens")
    return replace(
        buffers,
        positions=buffers.positions[:, :num_seqs],
        cu_seqlens_q=buffers.cu_seqlens_q[: num_seqs + 1],
        cu_seqlens_k=buffers.cu_seqlens_k[: num_seqs + 1],
        **{name: getattr(buffers, name)[:num_seqs] for name in per_sequence},
    )
