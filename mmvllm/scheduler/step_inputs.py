"""What the device needs to be told for one step, as host arrays: a schedule, packed.

Of a sequence that decodes the device has the rest (`DeviceRows`), so three numbers are enough, whatever its length.
"""

from dataclasses import dataclass

import numpy as np

from mmvllm.inputs import MediaItem
from mmvllm.lora.adapters import Adapter
from mmvllm.scheduler.output import Schedule, ScheduledChunk


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows [first, last) of an encoded item, needed in this step."""

    digest: bytes
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Prefills:
    """Chunks whose tokens the device does not have: P tokens of F sequences, packed, with B blocks."""

    input_ids: np.ndarray  # (P,) int64
    positions: np.ndarray  # (3, P) int64
    slot_mapping: np.ndarray  # (P,) int64
    query_lens: np.ndarray  # (F,) int32
    kv_lens: np.ndarray  # (F,) int32
    samples: np.ndarray  # (F,) bool, whether a token follows the chunk's last one: not in an unfinished prompt
    rows: np.ndarray  # (F,) int64
    position_deltas: np.ndarray  # (F,) int64
    blocks: np.ndarray  # (3, B) int64, of all sequences: row, place in the row, block
    image_at: np.ndarray  # (M,) int64, which of the P tokens each image row replaces
    row_spans: tuple[RowSpan, ...]  # where the M image rows come from


@dataclass(frozen=True, slots=True)
class Reads:
    """Q tokens of prefills whose hidden states are read, chunk by chunk.

    Log-probabilities are computed of the first L of them; each run of the others is summed.
    """

    at: np.ndarray  # (Q,) int64, which of the P tokens of `Prefills`
    targets: np.ndarray  # (L,) int64, the token that follows
    number: int  # of most likely tokens that are wanted with each target
    logprob_lens: tuple[int, ...]  # tokens of each chunk, L together
    pooled_lens: tuple[int, ...]  # of each other chunk


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """Tokens of a step that use LoRA adapters, as `AdapterRows` has them."""

    tokens: np.ndarray  # (L,) int64, sorted by slot
    ends: np.ndarray  # (slots,) int32

    @property
    def slots(self) -> frozenset[int]:
        return frozenset(np.flatnonzero(np.diff(self.ends, prepend=0)).tolist())


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step: D sequences that decode, then F prefills."""

    decodes: np.ndarray  # (3, D) int32: row, KV length with the token that is computed, last block
    prefills: Prefills | None  # None where all sequences decode
    samples: np.ndarray  # (2, R) int32, of the sequences that want a token: rows, and how many tokens come before it
    block_copies: list[tuple[int, int]]  # (source, destination) blocks, copied before anything is written
    new_items: tuple[MediaItem, ...]  # to encode in this step
    encoders: tuple[int, ...]  # the rank that encodes each of them
    freed_digests: tuple[bytes, ...]  # items whose rows the encoder cache has dropped since the last step
    reads: Reads | None = None  # None where nothing is read, as in all steps without prefills
    item_slots: tuple[int | None, ...] = ()  # of the adapters that new items go through, if any do
    new_adapters: tuple[tuple[int, Adapter], ...] = ()  # slots that are written before anything is computed
    adapters: AdapterTokens | None = None  # None where no sequence uses one

    @property
    def num_decodes(self) -> int:
        return self.decodes.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + (0 if self.prefills is None else len(self.prefills.input_ids))

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + (0 if self.prefills is None else len(self.prefills.rows))


def pack_step(step: Schedule, num_ranks: int = 1, num_slots: int = 0) -> StepInputs:
    """Pack a schedule; its new items are dealt out over ranks. There are so many slots for adapters."""
    rows = [chunk.seq.row for chunk in step.decodes]
    ends = [chunk.end for chunk in step.decodes]
    last_blocks = [chunk.seq.block_table[-1] for chunk in step.decodes]
    decodes = np.array([rows, ends, last_blocks], dtype=np.int32)
    prefills = _pack_prefills(step.prefills) if step.prefills else None
    samples = decodes[:2]
    if prefills is not None:
        of_prefills = np.stack([prefills.rows, prefills.kv_lens])[:, prefills.samples]
        samples = np.concatenate([samples, of_prefills], axis=1, dtype=np.int32)
    new_items = tuple(step.items_to_encode.values())
    return StepInputs(
        decodes=decodes,
        prefills=prefills,
        samples=samples,
        block_copies=[copy for chunk in step.chunks if chunk.block_copies for copy in chunk.block_copies],
        new_items=new_items,
        encoders=_deal([item.num_patches for item in new_items], num_ranks),
        freed_digests=step.freed_digests,
        reads=_pack_reads(step) if prefills is not None else None,
        item_slots=tuple(map(step.item_slots.get, step.items_to_encode)) if step.item_slots else (),
        new_adapters=step.new_adapters,
        adapters=_adapter_tokens(step, num_slots) if num_slots else None,
    )


def _pack_reads(step: Schedule) -> Reads | None:
    with_logprobs, pooled = step.read_chunks
    if not with_logprobs and not pooled:
        return None
    ends = np.cumsum([chunk.end - chunk.start for chunk in step.prefills])
    shifts = {id(chunk): end - chunk.end for chunk, end in zip(step.prefills, ends, strict=True)}
    at = [np.arange(chunk.reads.start, chunk.reads.stop) + shifts[id(chunk)] for chunk in with_logprobs + pooled]
    targets = [chunk.seq.token_ids[chunk.reads.start + 1 : chunk.reads.stop + 1] for chunk in with_logprobs]
    return Reads(
        at=np.concatenate(at),
        targets=np.array([token_id for own in targets for token_id in own], dtype=np.int64),
        number=max((chunk.seq.reads.number for chunk in with_logprobs), default=0),
        logprob_lens=tuple(len(chunk.reads) for chunk in with_logprobs),
        pooled_lens=tuple(len(chunk.reads) for chunk in pooled),
    )


def _adapter_tokens(step: Schedule, num_slots: int) -> AdapterTokens | None:
    """The tokens of each slot, in the order in which the chunks are packed."""
    chunks = step.chunks
    slots = [-1 if chunk.seq.adapter_slot is None else chunk.seq.adapter_slot for chunk in chunks]
    if max(slots) < 0:
        return None
    of_tokens = np.repeat(slots, [chunk.end - chunk.start for chunk in chunks])
    order = np.argsort(of_tokens, kind="stable")
    first = np.count_nonzero(of_tokens < 0)
    ends = np.searchsorted(of_tokens[order][first:], np.arange(num_slots), side="right")
    return AdapterTokens(order[first:], ends.astype(np.int32))


def _deal(num_patches: list[int], num_ranks: int) -> tuple[int, ...]:
    """A rank for each item, the largest items first, each to the rank that has the fewest patches."""
    ranks, totals = [0] * len(num_patches), [0] * num_ranks
    for i in sorted(range(len(num_patches)), key=num_patches.__getitem__, reverse=True):
        ranks[i] = totals.index(min(totals))
        totals[ranks[i]] += num_patches[i]
    return tuple(ranks)


def _pack_prefills(chunks: list[ScheduledChunk]) -> Prefills:
    query_lens = np.array([chunk.end - chunk.start for chunk in chunks], dtype=np.int32)
    image_at, row_spans = _row_spans(chunks, np.cumsum(query_lens) - query_lens)
    return Prefills(
        input_ids=np.concatenate([np.array(chunk.seq.token_ids[chunk.start : chunk.end]) for chunk in chunks]),
        positions=np.concatenate([chunk.seq.positions_of(chunk.start, chunk.end) for chunk in chunks], axis=1),
        slot_mapping=np.concatenate([_slots(chunk) for chunk in chunks]),
        query_lens=query_lens,
        kv_lens=np.array([chunk.end for chunk in chunks], dtype=np.int32),
        samples=np.array([chunk.samples for chunk in chunks]),
        rows=np.array([chunk.seq.row for chunk in chunks]),
        position_deltas=np.array([chunk.seq.mrope_position_delta for chunk in chunks]),
        blocks=np.concatenate([_blocks(chunk.seq.row, chunk.seq.block_table) for chunk in chunks], axis=1),
        image_at=image_at,
        row_spans=row_spans,
    )


def _slots(chunk: ScheduledChunk) -> np.ndarray:
    tokens, block_size = np.arange(chunk.start, chunk.end), chunk.seq.block_size
    first = chunk.start // block_size
    return np.array(chunk.seq.block_table[first:])[tokens // block_size - first] * block_size + tokens % block_size


def _blocks(row: int, block_table: list[int]) -> np.ndarray:
    return np.stack([np.full(len(block_table), row), np.arange(len(block_table)), np.array(block_table)])


def _row_spans(chunks: list[ScheduledChunk], starts: np.ndarray) -> tuple[np.ndarray, tuple[RowSpan, ...]]:
    """The part of each item that lies inside its chunk: where its rows go among the tokens, and which they are."""
    at, spans = [np.empty(0, dtype=np.int64)], []
    for begin, chunk in zip(starts, chunks, strict=True):
        for i in chunk.seq.items_in(chunk.start, chunk.end):
            item = chunk.seq.items[i]
            first, last = item.rows_in(chunk.start, chunk.end)
            at.append(np.arange(first, last) + item.offset - chunk.start + begin)
            spans.append(RowSpan(item.digest, first, last))
    return np.concatenate(at), tuple(spans)
