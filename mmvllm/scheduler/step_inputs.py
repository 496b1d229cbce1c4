"""Packs a `SchedulerOutput` into the host arrays that one step copies to the device.

The device keeps the state of running sequences (`InputBatch`), so a sequence that decodes needs three numbers, whatever
its length.
"""

from dataclasses import dataclass

import numpy as np

from mmvllm.inputs import MultiModalItem
from mmvllm.lora.adapters import Adapter
from mmvllm.scheduler.output import ScheduledChunk, SchedulerOutput


@dataclass(frozen=True, slots=True)
class EmbedSlice:
    """Embeddings [first, last) of one encoded item, spliced in during this step."""

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
    req_indices: np.ndarray  # (F,) int64, indices into `InputBatch`
    position_deltas: np.ndarray  # (F,) int64
    blocks: np.ndarray  # (3, B) int64, of all sequences: request index, position in its block table, block
    mm_token_indices: np.ndarray  # (M,) int64, which of the P tokens each embedding belongs to
    embed_slices: tuple[EmbedSlice, ...]  # where the M embeddings come from


@dataclass(frozen=True, slots=True)
class PromptOutputTokens:
    """Q prefill tokens that have prompt outputs, chunk by chunk.

    The first L give prompt log-probabilities; the hidden states of each remaining chunk are summed for pooling.
    """

    token_indices: np.ndarray  # (Q,) int64, which of the P tokens of `Prefills`
    targets: np.ndarray  # (L,) int64, the token that follows
    number: int  # of most likely tokens to return with each target
    logprob_lens: tuple[int, ...]  # tokens of each chunk with log-probabilities, L in total
    pooled_lens: tuple[int, ...]  # tokens of each pooled chunk


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
    """Inputs of one step: D sequences that decode, then F prefills."""

    decodes: np.ndarray  # (3, D) int32: request index, KV length including the computed token, last block
    prefills: Prefills | None  # None where all sequences decode
    samples: np.ndarray  # (2, R) int32, of the sampled sequences: request index, and number of preceding tokens
    block_copies: list[tuple[int, int]]  # (source, destination) blocks, copied before anything is written
    new_mm_items: tuple[MultiModalItem, ...]  # items to encode in this step
    encoders: tuple[int, ...]  # the rank that encodes each of them
    freed_digests: tuple[bytes, ...]  # items that the encoder cache has dropped since the last step
    prompt_output_tokens: PromptOutputTokens | None = None  # None if the step has no prompt outputs
    item_slots: tuple[int | None, ...] = ()  # adapter slot of each new item, if any item has one
    new_adapters: tuple[tuple[int, Adapter], ...] = ()  # (slot, adapter) pairs, written before the step computes
    adapters: AdapterTokens | None = None  # None where no sequence uses one

    @property
    def num_decodes(self) -> int:
        return self.decodes.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + (0 if self.prefills is None else len(self.prefills.input_ids))

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + (0 if self.prefills is None else len(self.prefills.req_indices))


def pack_step(step: SchedulerOutput, num_ranks: int = 1, num_slots: int = 0) -> StepInputs:
    """Pack a step for `num_ranks` ranks, which share the new items, and `num_slots` adapter slots."""
    req_indices = [chunk.seq.req_index for chunk in step.decodes]
    ends = [chunk.end for chunk in step.decodes]
    last_blocks = [chunk.seq.block_table[-1] for chunk in step.decodes]
    decodes = np.array([req_indices, ends, last_blocks], dtype=np.int32)
    prefills = _pack_prefills(step.prefills) if step.prefills else None
    samples = decodes[:2]
    if prefills is not None:
        of_prefills = np.stack([prefills.req_indices, prefills.kv_lens])[:, prefills.samples]
        samples = np.concatenate([samples, of_prefills], axis=1, dtype=np.int32)
    new_mm_items = tuple(step.mm_items_to_encode.values())
    return StepInputs(
        decodes=decodes,
        prefills=prefills,
        samples=samples,
        block_copies=[copy for chunk in step.chunks if chunk.block_copies for copy in chunk.block_copies],
        new_mm_items=new_mm_items,
        encoders=_deal([item.num_patches for item in new_mm_items], num_ranks),
        freed_digests=step.freed_digests,
        prompt_output_tokens=_prompt_output_tokens(step) if prefills is not None else None,
        item_slots=tuple(map(step.item_slots.get, step.mm_items_to_encode)) if step.item_slots else (),
        new_adapters=step.new_adapters,
        adapters=_adapter_tokens(step, num_slots) if num_slots else None,
    )


def _prompt_output_tokens(step: SchedulerOutput) -> PromptOutputTokens | None:
    with_logprobs, pooled = step.prompt_output_chunks
    if not with_logprobs and not pooled:
        return None
    ends = np.cumsum([chunk.end - chunk.start for chunk in step.prefills])
    shifts = {id(chunk): end - chunk.end for chunk, end in zip(step.prefills, ends, strict=True)}
    chunks = with_logprobs + pooled
    indices = [np.arange(chunk.prompt_tokens.start, chunk.prompt_tokens.stop) + shifts[id(chunk)] for chunk in chunks]
    targets = [chunk.seq.token_ids[i + 1] for chunk in with_logprobs for i in chunk.prompt_tokens]
    return PromptOutputTokens(
        token_indices=np.concatenate(indices),
        targets=np.array(targets, dtype=np.int64),
        number=max((chunk.seq.prompt_outputs.number for chunk in with_logprobs), default=0),
        logprob_lens=tuple(len(chunk.prompt_tokens) for chunk in with_logprobs),
        pooled_lens=tuple(len(chunk.prompt_tokens) for chunk in pooled),
    )


def _adapter_tokens(step: SchedulerOutput, num_slots: int) -> AdapterTokens | None:
    """Sort the packed tokens by adapter slot; None if no sequence has an adapter."""
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
    """Assign items to ranks, largest first, each to the rank with the fewest patches so far."""
    ranks, totals = [0] * len(num_patches), [0] * num_ranks
    for i in sorted(range(len(num_patches)), key=num_patches.__getitem__, reverse=True):
        ranks[i] = totals.index(min(totals))
        totals[ranks[i]] += num_patches[i]
    return tuple(ranks)


def _pack_prefills(chunks: list[ScheduledChunk]) -> Prefills:
    query_lens = np.array([chunk.end - chunk.start for chunk in chunks], dtype=np.int32)
    mm_token_indices, embed_slices = _embed_slices(chunks, np.cumsum(query_lens) - query_lens)
    return Prefills(
        input_ids=np.concatenate([np.array(chunk.seq.token_ids[chunk.start : chunk.end]) for chunk in chunks]),
        positions=np.concatenate([chunk.seq.positions_of(chunk.start, chunk.end) for chunk in chunks], axis=1),
        slot_mapping=np.concatenate([_slots(chunk) for chunk in chunks]),
        query_lens=query_lens,
        kv_lens=np.array([chunk.end for chunk in chunks], dtype=np.int32),
        samples=np.array([chunk.samples for chunk in chunks]),
        req_indices=np.array([chunk.seq.req_index for chunk in chunks]),
        position_deltas=np.array([chunk.seq.mrope_position_delta for chunk in chunks]),
        blocks=np.concatenate([_blocks(chunk.seq.req_index, chunk.seq.block_table) for chunk in chunks], axis=1),
        mm_token_indices=mm_token_indices,
        embed_slices=embed_slices,
    )


def _slots(chunk: ScheduledChunk) -> np.ndarray:
    tokens, block_size = np.arange(chunk.start, chunk.end), chunk.seq.block_size
    first = chunk.start // block_size
    return np.array(chunk.seq.block_table[first:])[tokens // block_size - first] * block_size + tokens % block_size


def _blocks(req_index: int, block_table: list[int]) -> np.ndarray:
    return np.stack([np.full(len(block_table), req_index), np.arange(len(block_table)), np.array(block_table)])


def _embed_slices(chunks: list[ScheduledChunk], starts: np.ndarray) -> tuple[np.ndarray, tuple[EmbedSlice, ...]]:
    """The embeddings of each item that fall inside its chunk: their token indices, and their slices."""
    mm_token_indices, embed_slices = [np.empty(0, dtype=np.int64)], []
    for begin, chunk in zip(starts, chunks, strict=True):
        for i in chunk.seq.mm_items_in(chunk.start, chunk.end):
            item = chunk.seq.mm_items[i]
            first, last = item.embeds_in(chunk.start, chunk.end)
            mm_token_indices.append(np.arange(first, last) + item.offset - chunk.start + begin)
            embed_slices.append(EmbedSlice(item.digest, first, last))
    return np.concatenate(mm_token_indices), tuple(embed_slices)
