"""`Sequence` and `SequenceGroup` as readers of nano-vllm and vLLM know them."""

import numpy as np
import pytest

from mmvllm import SamplingParams
from mmvllm.scheduler.sequence import Sequence, SequenceGroup, SequenceStatus

PARAMS = SamplingParams(temperature=0.5, max_tokens=7, ignore_eos=True)


def sequence(num_tokens=10, request_id="r", **keys) -> Sequence:
    return Sequence(list(range(num_tokens)), PARAMS, request_id=request_id, block_size=4, **keys)


def test_parameters_are_read_through_the_sequence():
    seq = sequence()
    assert (seq.temperature, seq.max_tokens, seq.ignore_eos) == (0.5, 7, True)
    assert seq.last_token == 9
    seq.append_token(77)
    assert seq.last_token == 77 and len(seq.prompt_token_ids) == 10
    assert seq.completion_token_ids == seq.output_token_ids == [77]
    assert len(seq) == seq.num_tokens == 11 and seq[-1] == 77 and seq[:2] == [0, 1]


@pytest.mark.parametrize(
    "name", ["temperature", "max_tokens", "ignore_eos", "last_token", "num_tokens", "num_blocks", "num_cached_blocks"]
)
def test_derived_values_are_read_only(name):
    with pytest.raises(AttributeError):
        setattr(sequence(), name, 3)


def test_cached_tokens_are_whole_blocks():
    seq = sequence()
    assert seq.num_cached_tokens == 0
    for number in (8, 0, 4):
        seq.num_cached_tokens = number
        assert seq.num_cached_tokens == number
    for number in (1, 7, 10):
        with pytest.raises(AssertionError, match=f"{number} cached tokens, blocks have 4"):
            seq.num_cached_tokens = number
    assert seq.num_cached_tokens == 4


@pytest.mark.parametrize("num_tokens, last", [(1, [0]), (4, [0, 1, 2, 3]), (5, [4]), (10, [8, 9])])
def test_blocks(num_tokens, last):
    seq = sequence(num_tokens)
    assert seq.last_block() == last and seq.last_block_num_tokens == len(last)
    assert [token for i in range(seq.num_blocks) for token in seq.block(i)] == seq.token_ids
    for i in (-1, seq.num_blocks):
        with pytest.raises(AssertionError, match=f"block {i} of {seq.num_blocks}"):
            seq.block(i)


def test_the_last_block_checks_its_number_of_tokens(monkeypatch):
    monkeypatch.setattr(Sequence, "last_block_num_tokens", property(lambda self: 3))
    with pytest.raises(AssertionError, match="2 tokens, want 3"):
        sequence(10).last_block()


def test_a_sequence_owns_its_token_ids():
    token_ids = [1, 2, 3]
    seq = Sequence(token_ids, PARAMS, request_id="r", block_size=4)
    token_ids.append(4)
    assert seq.token_ids == [1, 2, 3]
    seq.append_token(5)
    assert token_ids == [1, 2, 3, 4]


def test_positions_of_prompt_and_completion():
    positions = np.array([[0, 1, 1], [0, 1, 1], [0, 1, 2]])
    seq = Sequence([5, 6, 7], PARAMS, request_id="r", block_size=4, positions=positions, mrope_position_delta=-1)
    seq.append_token(8)
    assert seq.positions_of(1, 4).tolist() == [[1, 1, 2], [1, 1, 2], [1, 2, 2]]
    assert sequence(3).positions_of(0, 3).tolist() == [[0, 1, 2]] * 3


def test_order_of_service_is_priority_then_arrival_then_creation():
    late, early, urgent = (
        sequence(arrival_time=2.0),
        sequence(arrival_time=1.0),
        sequence(priority=-1, arrival_time=3.0),
    )
    same = sequence(arrival_time=1.0)
    assert sorted([late, same, early, urgent]) == [urgent, early, same, late]


def test_a_group_of_several_sequences():
    headers = {"traceparent": "00-ab"}
    seqs = [sequence(request_id="q", arrival_time=5.0) for _ in range(3)]
    group = SequenceGroup(seqs, headers)
    assert group.first_seq is seqs[0] and not group.is_single_seq
    assert group.seqs_dict == {seq.seq_id: seq for seq in seqs} and len(group.seqs_dict) == 3
    assert (group.request_id, group.arrival_time, group.sampling_params, group.priority) == ("q", 5.0, PARAMS, 0)
    assert group.trace_headers is headers
    assert not group.has_begun and not group.is_finished
    for name in ("arrival_time", "sampling_params", "first_seq", "is_single_seq", "seqs_dict"):
        with pytest.raises(AttributeError):
            setattr(group, name, None)


def test_a_group_of_one_sequence_begins_and_finishes_with_it():
    group = SequenceGroup([sequence()])
    assert group.is_single_seq and group.trace_headers is None
    group.first_seq.status = SequenceStatus.RUNNING
    assert group.has_begun
    group.first_seq.status = SequenceStatus.WAITING
    assert not group.has_begun
    group.first_seq.append_token(1)
    assert group.has_begun, "it waits to run again"
    group.first_seq.status = SequenceStatus.FINISHED
    assert group.is_finished


def test_the_engine_keeps_arrival_time_and_trace_headers(checkpoint, make_llm):
    engine = make_llm(checkpoint).engine
    request_id = engine.add_request("x", PARAMS, arrival_time=12.5, trace_headers={"a": "b"})
    group = engine.scheduler.groups[request_id]
    assert group.arrival_time == 12.5 and group.trace_headers == {"a": "b"} and group.sampling_params is PARAMS
    assert engine.abort_request(request_id).arrival_time == 12.5
