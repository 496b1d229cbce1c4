"""`Batch` alone: packing, the largest prompt batch, buffers of decode steps and views of them."""

import numpy as np
import pytest
import torch

from mmvllm.batch import Batch, RowSpan, decode_buffers, first_sequences, pack, prompt_batch

CPU = torch.device("cpu")


def packed(**changes) -> Batch:
    """Two sequences: a chunk of three tokens behind two others, and one decode."""
    given = {
        "input_ids": np.array([1, 2, 3, 4]),
        "positions": np.tile([2, 3, 4, 9], (3, 1)),
        "slot_mapping": np.array([2, 3, 4, 21]),
        "query_lens": [3, 1],
        "kv_lens": [5, 10],
        "block_table": np.array([[0, 1, 0], [3, 4, 5]]),
        "sample_at": [2, 3],
        "device": CPU,
    }
    given |= changes
    return pack(given.pop("input_ids"), **given)


def test_lengths_are_summed_and_kept_on_the_host():
    batch = packed()
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4] and batch.cu_seqlens_k.tolist() == [0, 5, 15]
    assert batch.kv_lens.tolist() == [5, 10] and batch.context_lens == (5, 10) and batch.query_lens == (3, 1)


def test_dtypes_are_those_that_kernels_read():
    batch = packed(input_ids=np.array([1, 2, 3, 4], dtype=np.uint8), positions=np.zeros((3, 4)))
    int64 = ("input_ids", "positions", "slot_mapping", "sample_at", "image_at", "block_copies")
    assert {getattr(batch, name).dtype for name in int64} == {torch.int64}
    int32 = ("cu_seqlens_q", "kv_lens", "cu_seqlens_k", "block_table")
    assert {getattr(batch, name).dtype for name in int32} == {torch.int32}


def test_defaults_have_no_images_and_no_copies():
    batch = packed()
    assert batch.image_at.shape == (0,) and batch.block_copies.shape == (2, 0)
    assert batch.row_spans == batch.new_items == batch.freed_digests == ()


def test_copies_are_rows_of_sources_and_destinations():
    batch = packed(block_copies=[(1, 7), (2, 8)], image_at=np.array([0, 1]), row_spans=(RowSpan(b"A", 3, 5),))
    assert batch.block_copies.tolist() == [[1, 2], [7, 8]] and batch.image_at.tolist() == [0, 1]


def test_ids_that_are_on_the_device_are_not_copied():
    ids = torch.tensor([1, 2, 3, 4])
    assert packed(input_ids=ids).input_ids is ids


def test_a_batch_does_not_share_the_memory_of_arrays_that_are_converted():
    table = np.array([[0, 1, 0], [3, 4, 5]])
    batch = packed(block_table=table)
    table[:] = 0
    assert batch.block_table.tolist() == [[0, 1, 0], [3, 4, 5]]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"positions": np.zeros((3, 5))}, r"positions \(3, 5\), want \(3, 4\)"),
        ({"positions": np.zeros((1, 4))}, r"positions \(1, 4\), want \(3, 4\)"),
        ({"slot_mapping": np.zeros(3)}, r"slot_mapping \(3,\), want \(4,\)"),
        ({"query_lens": [3, 2]}, "query_lens sum to 5, want 4"),
        ({"kv_lens": [5]}, r"cu_seqlens_q \(3,\), want \(2,\)"),
    ],
)
def test_parts_of_different_sizes_are_refused(changes, message):
    with pytest.raises(AssertionError, match=message):
        packed(**changes)


@pytest.mark.parametrize("num_tokens, num_logits, num_blocks", [(1, 1, 1), (16, 4, 1), (17, 17, 2), (4096, 64, 256)])
def test_the_largest_prompt_batch(num_tokens, num_logits, num_blocks):
    batch = prompt_batch(num_tokens, num_logits, block_size=16, device=CPU)
    assert batch.input_ids.tolist() == [0] * num_tokens
    assert batch.query_lens == batch.context_lens == (num_tokens,)
    assert torch.equal(batch.positions, torch.arange(num_tokens).expand(3, -1))
    assert batch.slot_mapping.tolist() == list(range(num_tokens))
    assert batch.block_table.tolist() == [list(range(num_blocks))]
    assert batch.sample_at.tolist() == list(range(num_logits))


def test_decode_buffers_are_padding_that_writes_to_the_scratch_block():
    batch = decode_buffers(num_seqs=3, max_model_len=100, block_size=16, scratch_block=9, device=CPU)
    assert batch.input_ids.shape == (3,) and batch.positions.shape == (3, 3)
    assert batch.slot_mapping.tolist() == [144] * 3 and batch.block_table.tolist() == [[9] * 7] * 3
    assert batch.kv_lens.tolist() == [1, 1, 1] and batch.cu_seqlens_q.tolist() == batch.cu_seqlens_k.tolist()
    assert batch.query_lens == (1, 1, 1) and batch.context_lens == (100, 100, 100)
    assert batch.sample_at.tolist() == [0, 1, 2]


@pytest.mark.parametrize("num_seqs", [1, 2, 4])
def test_the_first_sequences_of_buffers_are_views(num_seqs):
    buffers = decode_buffers(num_seqs=4, max_model_len=64, block_size=16, scratch_block=5, device=CPU)
    first = first_sequences(buffers, num_seqs)
    assert first.query_lens == (1,) * num_seqs and first.context_lens == (64,) * num_seqs
    assert first.block_table.shape == (num_seqs, 4) and first.positions.shape == (3, num_seqs)
    assert first.cu_seqlens_q.tolist() == list(range(num_seqs + 1))
    views = ("input_ids", "positions", "slot_mapping", "kv_lens", "block_table", "sample_at")
    for name in (*views, "cu_seqlens_q", "cu_seqlens_k"):
        assert getattr(first, name).data_ptr() == getattr(buffers, name).data_ptr(), name
    buffers.input_ids[0], buffers.positions[:, 0], buffers.kv_lens[0] = 42, 7, 8
    assert first.input_ids[0] == 42 and first.positions[:, 0].tolist() == [7, 7, 7] and first.kv_lens[0] == 8
