"""What one step returns to the host: sampled tokens, prompt log-probabilities, sums of hidden states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mmvllm.errors import RequestError
from mmvllm.outputs import Logprob, LogprobsById
from mmvllm.scheduler.beam_search import Candidate


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a sampled token, and of the most likely tokens by id."""

    logprob: float
    logprobs: LogprobsById


@dataclass(frozen=True, slots=True)
class LogprobsLists:
    """Log-probabilities of a run of target tokens, with their ranks and the k most likely tokens beside each."""

    logprobs: list[float]
    ranks: list[int]
    top: list[list[float]]
    top_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The tokens sampled in one step, one per row of logits.

    Args:
        token_ids: -1 where no token can follow.
        logprobs: by index into `token_ids`, for requests that asked for log-probabilities.
        errors: by index into `token_ids`, the reason why no token can follow, where one is known.
        candidates: by index into `token_ids`, the candidates of beams, whose sampled tokens are ignored; empty where no
            token can follow.
        prompt_outputs: for each chunk in `SchedulerOutput.prompt_output_chunks`, the log-probabilities of its tokens or
            the sum of its hidden states (C,).
    """

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    errors: Mapping[int, RequestError] = field(default_factory=dict)
    candidates: Mapping[int, list[Candidate]] = field(default_factory=dict)
    prompt_outputs: Sequence[LogprobsLists | list[float]] = ()


def token_logprobs(
    token_id: int, logprob: float, rank: int, top: Sequence[float], top_ids: Sequence[int]
) -> LogprobsById:
    """The log-probability of a token, then of the most likely tokens in descending order, by id."""
    found = {token_id: Logprob(logprob, rank)}
    for rank, (value, top_id) in enumerate(zip(top, top_ids, strict=True), 1):
        if top_id != token_id:
            found[top_id] = Logprob(value, rank)
    return found
