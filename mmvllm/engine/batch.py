"""One forward pass as packed tensors, and the only place that packs them.

Letters used for shapes everywhere: N tokens in a step, S sequences, T tokens of a sequence, H query heads, K KV heads,
D head size, C hidden size, P patches, M merged image rows, V vocabulary, R rows that want a token.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmvllm.engine.scheduler import Schedule, ScheduledChunk
from mmvllm.layers.transfer import to_device


@dataclass(frozen=True, slots=True)
class NewImage:
    """A picture to encode in this step."""

    digest: bytes
    pixel_values: Tensor  # (P, patch_dim) uint8, or floats already normalised; on the host
    grid_thw: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Rows [first, last) of an encoded picture, needed in this step."""

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
    image_spans: tuple[ImageSpan, ...]  # where those M rows come from
    new_images: tuple[NewImage, ...]
    block_copies: Tensor  # (2, number) int64: source and destination blocks, copied before anything is written
    query_lens: tuple[int, ...]  # on the host
    context_lens: tuple[int, ...]  # kv_lens, on the host

    def __post_init__(self) -> None:
        N, S = len(self.input_ids), len(self.kv_lens)
        assert self.positions.shape == (3, N), f"positions {tuple(self.positions.shape)}, want (3, {N})"
        assert self.slot_mapping.shape == (N,), f"slot_mapping {tuple(self.slot_mapping.shape)}, want ({N},)"
        assert self.cu_seqlens_q.shape == (S + 1,), f"cu_seqlens_q {tuple(self.cu_seqlens_q.shape)}, want ({S + 1},)"
        assert sum(self.query_lens) == N, f"query_lens sum to {sum(self.query_lens)}, want {N}"


def build_batch(step: Schedule, block_size: int, device: torch.device, sampled: Tensor | None = None) -> Batch:
    """Pack what the scheduler handed out; `sampled` (R,) are the ids, on the device, that `step.rows` speaks of."""
    chunks = step.chunks
    query_lens = [chunk.end - chunk.start for chunk in chunks]
    kv_lens = [chunk.end for chunk in chunks]
    cu_seqlens = np.cumsum([0, *query_lens])
    image_at, image_spans = _image_rows(chunks, cu_seqlens)
    copies = [copy for chunk in chunks for copy in chunk.block_copies]

    def on_device(values, dtype: type) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values, dtype=dtype)), device)

    if step.rows is None:
        token_ids = [chunk.seq.token_ids[chunk.start : chunk.end] for chunk in chunks]
        input_ids = on_device(np.concatenate(token_ids), np.int64)
    else:
        input_ids = sampled[on_device(step.rows, np.int64)]

    return Batch(
        input_ids=input_ids,
        positions=on_device(
            np.concatenate([chunk.seq.positions_of(chunk.start, chunk.end) for chunk in chunks], axis=1), np.int64
        ),
        slot_mapping=on_device(np.concatenate([_slots(chunk, block_size) for chunk in chunks]), np.int64),
        cu_seqlens_q=on_device(cu_seqlens, np.int32),
        kv_lens=on_device(kv_lens, np.int32),
        cu_seqlens_k=on_device(np.cumsum([0, *kv_lens]), np.int32),
        block_table=on_device(_block_table(chunks), np.int32),
        sample_at=on_device([cu_seqlens[s + 1] - 1 for s, chunk in enumerate(chunks) if chunk.samples], np.int64),
        image_at=on_device(image_at, np.int64),
        image_spans=image_spans,
        new_images=tuple(
            NewImage(digest, seq.pixel_values[i], seq.image_grid_thw[i])
            for digest, (seq, i) in step.images_to_encode.items()
        ),
        block_copies=on_device(np.array(copies, dtype=np.int64).reshape(-1, 2).T, np.int64),
        query_lens=tuple(query_lens),
        context_lens=tuple(kv_lens),
    )


def _slots(chunk: ScheduledChunk, block_size: int) -> np.ndarray:
    tokens = np.arange(chunk.start, chunk.end)
    return np.asarray(chunk.seq.block_table)[tokens // block_size] * block_size + tokens % block_size


def _block_table(chunks: list[ScheduledChunk]) -> np.ndarray:
    table = np.zeros((len(chunks), max(len(chunk.seq.block_table) for chunk in chunks)), dtype=np.int32)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.seq.block_table)] = chunk.seq.block_table
    return table


def _image_rows(chunks: list[ScheduledChunk], cu_seqlens: np.ndarray) -> tuple[np.ndarray, tuple[ImageSpan, ...]]:
    """The part of each picture that lies inside its chunk.

    tokens of the sequence   |----[ picture: offset, length ]----|
    tokens of the chunk             [ start ....... end )
    """
    rows, spans = [np.empty(0, dtype=np.int64)], []
    for begin, chunk in zip(cu_seqlens, chunks, strict=False):
        vision = chunk.seq.vision
        for i in vision.touching(chunk.start, chunk.end):
            offset, length = vision.vision_placeholders[i]
            first, last = max(chunk.start, offset), min(chunk.end, offset + length)
            rows.append(np.arange(first, last) - chunk.start + begin)
            spans.append(ImageSpan(vision.image_digests[i], first - offset, last - offset))
    return np.concatenate(rows), tuple(spans)
