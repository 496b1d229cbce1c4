"""The tokens that a step sampled, and what it read of prompts, on the host."""

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
class RowLogprobs:
    """Of a run of rows, each with a target token and its k most likely tokens."""

    logprobs: list[float]
    ranks: list[int]
    top: list[list[float]]
    top_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each row of logits.

    Args:
        token_ids: -1 where the logits allow none.
        logprobs: by place in `token_ids`, of the requests that asked for them.
        errors: why there is no token, by place, where more is known than that there is none.
        candidates: by place in `token_ids`, of beams, to which their tokens do not apply; none where the logits allow
            none.
        reads: of the chunks in `Schedule.read_chunks`: log-probabilities of rows, or a sum of hidden states (C,).
    """

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    errors: Mapping[int, RequestError] = field(default_factory=dict)
    candidates: Mapping[int, list[Candidate]] = field(default_factory=dict)
    reads: Sequence[RowLogprobs | list[float]] = ()


def token_logprobs(
    token_id: int, logprob: float, rank: int, top: Sequence[float], top_ids: Sequence[int]
) -> LogprobsById:
    """A token's log-probability, then those of the most likely tokens, by id; the most likely one comes first."""
    found = {token_id: Logprob(logprob, rank)}
    for place, (value, top_id) in enumerate(zip(top, top_ids, strict=True), 1):
        if top_id != token_id:
            found[top_id] = Logprob(value, place)
    return found
