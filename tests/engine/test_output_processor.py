"""Deltas of sequences whose tokens are written out by hand, and why a sequence ends."""

import pytest
from transformers import AutoTokenizer

from mmvllm.engine.output_processor import OutputProcessor
from mmvllm.models.folder import BUNDLED
from mmvllm.outputs import Delta, Logprob
from mmvllm.sampling_params import SamplingParams
from mmvllm.scheduler.detokenizer import CompletionText
from mmvllm.scheduler.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus

EOS = 461


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture
def processor(tokenizer) -> OutputProcessor:
    return OutputProcessor(tokenizer, frozenset([EOS]))


def running(**params) -> Sequence:
    seq = Sequence([1, 2, 3], SamplingParams(**{"max_tokens": 9} | params), request_id="a", block_size=4)
    seq.status = SequenceStatus.RUNNING
    return seq


def test_tokens_wait_for_their_character_and_keep_their_logprobs(tokenizer, processor):
    token_ids = tokenizer("a🦩b", add_special_tokens=False)["input_ids"]
    seq = running(logprobs=0)
    stream = processor.delta_stream(SequenceGroup([seq]))
    assert stream.deltas() == []
    deltas: list[Delta] = []
    for i, token_id in enumerate(token_ids):
        seq.append_token(token_id)
        seq.logprobs.append({token_id: Logprob(-float(i))})
        deltas += stream.deltas()
    assert [delta.text for delta in deltas] == ["a", "🦩", "b"]
    assert [delta.token_ids for delta in deltas] == [token_ids[:1], token_ids[1:-1], token_ids[-1:]]
    assert [logprobs for delta in deltas for logprobs in delta.logprobs] == seq.logprobs
    assert stream.deltas() == []


def test_a_stream_that_is_asked_late_gives_all_tokens_at_once(tokenizer, processor):
    seq = running()
    stream = processor.delta_stream(SequenceGroup([seq]))
    for token_id in tokenizer("two words", add_special_tokens=False)["input_ids"]:
        seq.append_token(token_id)
    (delta,) = stream.deltas()
    assert (delta.text, delta.token_ids, delta.num_prompt_tokens) == ("two words", seq.completion_token_ids, 3)


def test_the_last_delta_has_what_was_held(tokenizer, processor):
    token_ids = tokenizer("🦩", add_special_tokens=False)["input_ids"]
    seq = running()
    group = SequenceGroup([seq])
    stream = processor.delta_stream(group)
    for token_id in token_ids[:-1]:
        seq.append_token(token_id)
        assert stream.deltas() == []
    seq.status, seq.finish_reason = SequenceStatus.FINISHED, FinishReason.LENGTH
    group.output = processor.output(group)
    (delta,) = stream.deltas()
    assert delta.text == group.output.text and delta.token_ids == token_ids[:-1] and delta.output is group.output
    assert stream.deltas() == []


@pytest.mark.parametrize(
    ("params", "token_ids", "reason"),
    [
        ({}, [7, 8], None),
        ({}, [7, EOS], FinishReason.EOS),
        ({"ignore_eos": True}, [7, EOS], None),
        ({"min_tokens": 3}, [7, EOS], None),
        ({"stop_token_ids": [8]}, [7, 8], FinishReason.STOP),
        ({"stop_token_ids": [8], "min_tokens": 3}, [7, 8], None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [7, EOS], FinishReason.STOP),
        ({"max_tokens": 2}, [7, 8], FinishReason.LENGTH),
        ({"max_tokens": 2}, [7, EOS], FinishReason.EOS),
        ({"max_tokens": 2, "ignore_eos": True}, [7, EOS], FinishReason.LENGTH),
    ],
)
def test_why_a_sequence_ends(params, token_ids, reason, processor):
    seq = running(**params)
    for token_id in token_ids:
        seq.append_token(token_id)
        found = processor.finish_reason(seq)
    assert found is reason and processor.take_num_tokens() == 2


def test_a_stop_string_ends_a_sequence_in_the_commit(tokenizer, processor):
    seq = running(stop="o w")
    seq.completion_text = CompletionText(tokenizer, seq.sampling_params.stop)
    for token_id in tokenizer("two words", add_special_tokens=False)["input_ids"]:
        seq.append_token(token_id)
        if reason := processor.finish_reason(seq):
            break
    assert reason is FinishReason.STOP and seq.completion_text.found_stop[1] == 2
