"""What a model is given, from what a step tells the device and what the device kept of the steps before."""

import numpy as np
import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.scheduler.output import ScheduledChunk, SchedulerOutput
from mmvllm.scheduler.sequence import Sequence
from mmvllm.scheduler.step_inputs import pack_step
from mmvllm.utils.transfer import copy_packed
from mmvllm.worker.input_batch import InputBatch

CPU = torch.device("cpu")


def rows(max_num_seqs=4, max_blocks=8) -> InputBatch:
    return InputBatch(max_num_seqs, max_blocks, 4, 99, CPU)


def sequence(row: int, num_tokens: int, blocks: list[int], num_prompt_tokens: int | None = None, delta=0) -> Sequence:
    """Token i of the sequence in row r is 100 * r + i."""
    num_prompt_tokens = num_prompt_tokens or num_tokens
    token_ids = [100 * row + i for i in range(num_tokens)]
    positions = np.tile(np.arange(num_prompt_tokens), (3, 1)) * 2
    seq = Sequence(
        token_ids[:num_prompt_tokens],
        SamplingParams(),
        request_id=str(row),
        block_size=4,
        positions=positions,
        mrope_position_delta=delta,
    )
    for token_id in token_ids[num_prompt_tokens:]:
        seq.append_token(token_id)
    seq.req_index, seq.block_table = row, blocks
    return seq


def chunk(seq: Sequence, start: int, end: int, copies=()) -> ScheduledChunk:
    return ScheduledChunk(seq, start, end, end >= seq.num_tokens, 0, list(copies))


def test_a_prompt_is_packed_with_its_blocks():
    seq = sequence(2, 6, [5, 3])
    batch, samples = rows().batch(pack_step(SchedulerOutput(prefills=[chunk(seq, 0, 6)])))
    assert batch.input_ids.tolist() == [200, 201, 202, 203, 204, 205]
    assert batch.slot_mapping.tolist() == [20, 21, 22, 23, 12, 13]
    assert batch.positions.tolist() == [[0, 2, 4, 6, 8, 10]] * 3
    assert batch.block_table.tolist() == [[5, 3]] and batch.kv_lens.tolist() == [6]
    assert batch.cu_seqlens_q.tolist() == batch.cu_seqlens_k.tolist() == [0, 6] and batch.logits_indices.tolist() == [5]
    assert batch.query_lens == batch.context_lens == (6,) and batch.num_decodes == 0
    assert samples.tolist() == [[2], [6]]


def test_a_decode_takes_everything_but_three_numbers_from_the_device():
    device, seq = rows(), sequence(1, 7, [5, 3], delta=-3)
    device.batch(pack_step(SchedulerOutput(prefills=[chunk(seq, 0, 7)])))
    device.last_tokens[1] = 77  # sampled, and not seen by the host
    inputs = pack_step(SchedulerOutput(decodes=[chunk(seq, 7, 8)]))
    assert inputs.decodes.tolist() == [[1], [8], [3]]
    batch, samples = device.batch(inputs)
    assert batch.input_ids.tolist() == [77] and batch.positions.tolist() == [[4]] * 3
    assert batch.slot_mapping.tolist() == [15] and batch.block_table.tolist() == [[5, 3]]
    assert (
        batch.kv_lens.tolist() == [8] and batch.cu_seqlens_q.tolist() == [0, 1] and batch.logits_indices.tolist() == [0]
    )
    assert batch.num_decodes == 1 and batch.context_lens == (8,) and samples.tolist() == [[1], [8]]


def test_a_decode_that_gets_a_block_keeps_it_on_the_device():
    device, seq = rows(), sequence(0, 4, [5])
    device.batch(pack_step(SchedulerOutput(prefills=[chunk(seq, 0, 4)])))
    for start, block_table in ((4, [5, 7]), (5, [5, 7]), (6, [5, 8])):  # the last is a copy on write
        seq.block_table = block_table
        batch, _ = device.batch(pack_step(SchedulerOutput(decodes=[chunk(seq, start, start + 1)])))
        assert batch.block_table.tolist() == [block_table]
        assert batch.slot_mapping.tolist() == [4 * block_table[-1] + start - 4]


def test_decodes_come_before_prefills():
    device, old, new = rows(), sequence(3, 5, [6, 2]), sequence(0, 9, [1, 4, 7])
    device.batch(pack_step(SchedulerOutput(prefills=[chunk(old, 0, 5)])))
    device.last_tokens[3] = 42
    partial = chunk(new, 4, 7)
    batch, samples = device.batch(pack_step(SchedulerOutput(decodes=[chunk(old, 5, 6)], prefills=[partial])))
    assert batch.input_ids.tolist() == [42, 4, 5, 6] and batch.slot_mapping.tolist() == [9, 16, 17, 18]
    assert batch.positions.tolist() == [[5, 8, 10, 12]] * 3
    assert batch.block_table.tolist() == [[6, 2], [1, 4]] and batch.kv_lens.tolist() == [6, 7]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4] and batch.cu_seqlens_k.tolist() == [0, 6, 13]
    assert batch.query_lens == (1, 3) and batch.context_lens == (6, 7) and batch.num_decodes == 1
    assert batch.logits_indices.tolist() == [0] and samples.tolist() == [[3], [6]], "the prompt is not complete"


def test_a_row_that_changes_hands_has_nothing_of_its_former_sequence():
    device = rows()
    device.batch(pack_step(SchedulerOutput(prefills=[chunk(sequence(1, 8, [5, 3], delta=9), 0, 8)])))
    device.last_tokens[1] = 77
    seq = sequence(1, 3, [6], delta=-1)
    device.batch(pack_step(SchedulerOutput(prefills=[chunk(seq, 0, 3)])))
    device.last_tokens[1] = 78
    batch, _ = device.batch(pack_step(SchedulerOutput(decodes=[chunk(seq, 3, 4)])))
    assert batch.input_ids.tolist() == [78] and batch.positions.tolist() == [[2]] * 3
    assert batch.block_table.tolist() == [[6]]


def test_tokens_of_the_completion_that_are_computed_again_continue_the_prompts_positions():
    seq = sequence(0, 7, [5, 3], num_prompt_tokens=5, delta=3)
    batch, _ = rows().batch(pack_step(SchedulerOutput(prefills=[chunk(seq, 3, 7)])))
    assert batch.input_ids.tolist() == [3, 4, 5, 6] and batch.positions.tolist() == [[6, 8, 8, 9]] * 3


def test_block_copies_are_those_of_all_chunks():
    one, other = sequence(0, 5, [5, 3]), sequence(1, 5, [5, 4])
    step = SchedulerOutput(decodes=[chunk(one, 5, 6, copies=[(2, 3)])], prefills=[chunk(other, 4, 5, copies=[(2, 4)])])
    assert pack_step(step).block_copies == [(2, 3), (2, 4)]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_that_are_copied_together_keep_shape_type_and_values(dtype):
    arrays = [np.arange(6, dtype=dtype).reshape(3, 2).T, np.empty((3, 0), dtype=np.int32), np.array([7], dtype=dtype)]
    for tensor, array in zip(copy_packed(arrays, CPU), arrays, strict=True):
        assert tensor.tolist() == array.tolist() and tensor.numpy().dtype == array.dtype


def test_arrays_are_copied_together_into_a_buffer_that_stays():
    buffer = torch.zeros(64, dtype=torch.uint8)
    first = copy_packed([np.arange(3, dtype=np.int32), np.arange(2)], CPU, buffer)
    copy_packed([np.array([7, 8, 9], dtype=np.int32), np.array([5, 6]), np.array([1])], CPU, buffer)
    assert [tensor.tolist() for tensor in first] == [[7, 8, 9], [5, 6]]
