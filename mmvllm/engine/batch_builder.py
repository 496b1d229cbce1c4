"""A schedule -> the batch of one forward pass."""

import numpy as np
import torch
from torch import Tensor

from mmvllm.batch import Batch, RowSpan, pack
from mmvllm.engine.scheduler import Schedule, ScheduledChunk
from mmvllm.transfer import to_device


def build_batch(step: Schedule, block_size: int, device: torch.device, sampled: Tensor | None = None) -> Batch:
    """Pack a schedule; `sampled` (R,) are the ids, on the device, that `step.rows` indexes."""
    chunks = step.chunks
    query_lens = [chunk.end - chunk.start for chunk in chunks]
    starts = np.cumsum([0, *query_lens])
    image_at, row_spans = _row_spans(chunks, starts)
    if step.rows is None:
        input_ids = np.concatenate([chunk.seq.token_ids[chunk.start : chunk.end] for chunk in chunks])
    else:
        input_ids = sampled[to_device(torch.tensor(step.rows), device)]
    return pack(
        input_ids,
        positions=np.concatenate([chunk.seq.positions_of(chunk.start, chunk.end) for chunk in chunks], axis=1),
        slot_mapping=np.concatenate([_slots(chunk, block_size) for chunk in chunks]),
        query_lens=query_lens,
        kv_lens=[chunk.end for chunk in chunks],
        block_table=_block_table(chunks),
        sample_at=[starts[s + 1] - 1 for s, chunk in enumerate(chunks) if chunk.samples],
        image_at=image_at,
        row_spans=row_spans,
        new_items=tuple(step.items_to_encode.values()),
        freed_digests=step.freed_digests,
        block_copies=[copy for chunk in chunks for copy in chunk.block_copies],
        device=device,
    )


def _slots(chunk: ScheduledChunk, block_size: int) -> np.ndarray:
    tokens = np.arange(chunk.start, chunk.end)
    return np.asarray(chunk.seq.block_table)[tokens // block_size] * block_size + tokens % block_size


def _block_table(chunks: list[ScheduledChunk]) -> np.ndarray:
    table = np.zeros((len(chunks), max(len(chunk.seq.block_table) for chunk in chunks)), dtype=np.int32)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.seq.block_table)] = chunk.seq.block_table
    return table


def _row_spans(chunks: list[ScheduledChunk], starts: np.ndarray) -> tuple[np.ndarray, tuple[RowSpan, ...]]:
    """The part of each item that lies inside its chunk: where its rows go in the batch, and which they are."""
    at, spans = [np.empty(0, dtype=np.int64)], []
    for begin, chunk in zip(starts, chunks, strict=False):
        for i in chunk.seq.items_in(chunk.start, chunk.end):
            item = chunk.seq.items[i]
            first, last = item.rows_in(chunk.start, chunk.end)
            at.append(np.arange(first, last) + item.offset - chunk.start + begin)
            spans.append(RowSpan(item.digest, first, last))
    return np.concatenate(at), tuple(spans)
