"""Packs a `SchedulerOutput` into the host arrays that one step copies to the device.

The device keeps the state of running sequences (`InputBatch`), so a sequence that decodes needs three numbers, whatever
its length.
"""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from mmvllm.inputs import MultiModalItem
from mmvllm.lora.adapters import Adapter
from mmvllm.scheduler.output import ScheduledChunk, SchedulerOutput

Array = TypeVar("Array")  # np.ndarray on the host, Tensor on the device


@dataclass(frozen=True, slots=True)
class EmbedSlice:
    """Embeddings [first, last) of one encoded item, spliced in during this step."""

    digest: bytes
    first: int
    last: int


class MixedStep(NamedTuple, Generic[Array]):
    """The arrays of a step with prefills, on the host or on the device: what decodes comes first.

    D sequences decode, then F prefills compute P tokens with M embeddings; R sequences are sampled, and Q tokens have
    prompt outputs. `blocks`, whose size depends on contexts, is the last array.
    """

    decodes: Array  # (3, D) int32, as in `StepInputs`
    req_indices: Array  # (F,) int64, indices of the prefills into `InputBatch`
    position_deltas: Array  # (F,) int64
    input_ids: Array  # (P,) int64
    positions: Array  # (3, P) int64
    slot_mapping: Array  # (P,) int64
    mm_token_indices: Array  # (M,) int64, which of the D + P tokens each embedding belongs to
    logits_indices: Array  # (R + Q,) int64, among the D + P tokens: sampled ones, then those with prompt outputs
    samples: Array  # (2, R) int32, as in `StepInputs`
    kv_lens: Array  # (D + F,) int32
    cu_seqlens_q: Array  # (D + F + 1,) int32, running sums of lengths
    cu_seqlens_k: Array
    blocks: Array  # (3, B) int64, of all prefills: request index, position in its block table, block


@dataclass(frozen=True, slots=True)
class PromptOutputTokens:
    """Q prefill tokens that have prompt outputs, chunk by chunk.

    The first L give prompt log-probabilities; the hidden states of each remaining chunk are summed for pooling.
    """

    token_indices: np.ndarray  # (Q,) int64, among the tokens of the step
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
    mixed: MixedStep[np.ndarray] | None  # None where all sequences decode
    embed_slices: tuple[EmbedSlice, ...]  # where the embeddings of `mixed.mm_token_indices` come from
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
        return self.num_decodes + (0 if self.mixed is None else len(self.mixed.input_ids))

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + (0 if self.mixed is None else len(self.mixed.req_indices))


def pack_step(step: SchedulerOutput, num_ranks: int = 1, num_slots: int = 0) -> StepInputs:
    """Pack a step for `num_ranks` ranks, which share the new items, and `num_slots` adapter slots."""
    req_indices = [chunk.seq.req_index for chunk in step.decodes]
    ends = [chunk.end for chunk in step.decodes]
    last_blocks = [chunk.seq.block_table[-1] for chunk in step.decodes]
    decodes = np.array([req_indices, ends, last_blocks], dtype=np.int32)
    mixed, embed_slices, prompt_output_tokens = None, (), None
    if step.prefills:
        prompt_output_tokens = _prompt_output_tokens(step)
        mixed, embed_slices = _pack_mixed(step.prefills, decodes, prompt_output_tokens)
    new_mm_items = tuple(step.mm_items_to_encode.values())
    return StepInputs(
        decodes=decodes,
        mixed=mixed,
        embed_slices=embed_slices,
        samples=decodes[:2] if mixed is None else mixed.samples,
        block_copies=[copy for chunk in step.chunks if chunk.block_copies for copy in chunk.block_copies],
        new_mm_items=new_mm_items,
        encoders=_deal([item.num_patches for item in new_mm_items], num_ranks),
        freed_digests=step.freed_digests,
        prompt_output_tokens=prompt_output_tokens,
        item_slots=tuple(map(step.item_slots.get, step.mm_items_to_encode)) if step.item_slots else (),
        new_adapters=step.new_adapters,
        adapters=_adapter_tokens(step, num_slots) if num_slots else None,
    )


def _prompt_output_tokens(step: SchedulerOutput) -> PromptOutputTokens | None:
    with_logprobs, pooled = step.prompt_output_chunks
    if not with_logprobs and not pooled:
        return None
    ends = len(step.decodes) + np.cumsum([chunk.end - chunk.start for chunk in step.prefills])
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


def _pack_mixed(
    chunks: list[ScheduledChunk], decodes: np.ndarray, prompt_output_tokens: PromptOutputTokens | None
) -> tuple[MixedStep[np.ndarray], tuple[EmbedSlice, ...]]:
    D, lens = decodes.shape[1], [chunk.end - chunk.start for chunk in chunks]
    cu_seqlens_q = running_sum(np.concatenate([np.ones(D, dtype=np.int32), lens]))
    kv_lens = np.concatenate([decodes[1], [chunk.end for chunk in chunks]], dtype=np.int32)
    req_indices = np.array([chunk.seq.req_index for chunk in chunks])
    is_sampled = np.concatenate([np.ones(D, dtype=bool), [chunk.samples for chunk in chunks]])
    logits_indices = cu_seqlens_q[1:][is_sampled].astype(np.int64) - 1
    if prompt_output_tokens is not None:
        logits_indices = np.concatenate([logits_indices, prompt_output_tokens.token_indices])
    mm_token_indices, embed_slices = _embed_slices(chunks, cu_seqlens_q[D:-1])
    step = MixedStep(
        decodes=decodes,
        req_indices=req_indices,
        position_deltas=np.array([chunk.seq.mrope_position_delta for chunk in chunks]),
        input_ids=np.concatenate([np.array(chunk.seq.token_ids[chunk.start : chunk.end]) for chunk in chunks]),
        positions=np.concatenate([chunk.seq.positions_of(chunk.start, chunk.end) for chunk in chunks], axis=1),
        slot_mapping=np.concatenate([_slots(chunk) for chunk in chunks]),
        mm_token_indices=mm_token_indices,
        logits_indices=logits_indices,
        samples=np.stack([np.concatenate([decodes[0], req_indices]), kv_lens])[:, is_sampled].astype(np.int32),
        kv_lens=kv_lens,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=running_sum(kv_lens),
        blocks=np.concatenate([_blocks(chunk.seq.req_index, chunk.seq.block_table) for chunk in chunks], axis=1),
    )
    return step, embed_slices


def running_sum(lens: np.ndarray) -> np.ndarray:
    """Return the sums (N + 1,) int32 of the first 0 to N lengths."""
    return np.concatenate([[np.int32(0)], lens.cumsum(dtype=np.int32)])


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
