"""The completions that a request returns, of those that were generated: by `best_of`, or found by beam search."""

from collections.abc import Callable

from mmvllm.outputs import LogprobsById
from mmvllm.scheduler.beam_search import Candidate
from mmvllm.scheduler.sampler_output import token_logprobs
from mmvllm.scheduler.sequence import FinishReason, Sequence, SequenceGroup


def choose(group: SequenceGroup, finish_reason: Callable[[Sequence], FinishReason | None]) -> None:
    """Leave the completions of a finished request that are returned, best first, with their scores.

    `finish_reason` says why a sequence ended with its last token.
    """
    n = group.sampling_params.n
    if group.beams is None:
        group.seqs = _ranked(group.seqs)[:n]
    else:
        _write_hypotheses(group, finish_reason)
        group.seqs = group.seqs[:n]


def _ranked(seqs: list[Sequence]) -> list[Sequence]:
    """By log-probability per token, as OpenAI's `best_of` does; those that an abort left without tokens come last."""
    begun = [seq for seq in seqs if seq.num_completion_tokens]
    for seq in begun:
        seq.score = seq.cumulative_logprob / seq.num_completion_tokens
    begun.sort(key=lambda seq: seq.score, reverse=True)
    return begun + [seq for seq in seqs if not seq.num_completion_tokens]


def _logprobs(token_id: int, ranked: list[Candidate], number: int) -> LogprobsById:
    token_ids, values = [one.token_id for one in ranked], [one.logprob for one in ranked]
    place = token_ids.index(token_id)
    return token_logprobs(token_id, values[place], place + 1, values[:number], token_ids[:number])


def _write_hypotheses(group: SequenceGroup, finish_reason: Callable[[Sequence], FinishReason | None]) -> None:
    """Give the sequences the search's hypotheses; one that an abort ended may have fewer of them."""
    hypotheses = group.beams.search.hypotheses()
    for seq in group.seqs:
        seq.token_ids = seq.prompt_token_ids
    for seq, hypothesis in zip(group.seqs, hypotheses, strict=False):
        seq.token_ids += hypothesis.token_ids
        seq.cumulative_logprob, seq.score = hypothesis.cumulative_logprob, hypothesis.score
        pairs = zip(hypothesis.token_ids, hypothesis.ranked, strict=False)
        seq.logprobs = [_logprobs(token_id, ranked, seq.sampling_params.logprobs) for token_id, ranked in pairs]
        if hypothesis.is_finished:
            seq.finish_reason = finish_reason(seq)
