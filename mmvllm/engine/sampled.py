"""The tokens that a step sampled, on the host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mmvllm.engine.beam_search import Candidate


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a sampled token, and of the most likely tokens by id."""

    logprob: float
    logprobs: dict[int, float]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each row of logits.

    Args:
        token_ids: -1 where the logits allow none.
        logprobs: by place in `token_ids`, of the requests that asked for them.
        candidates: by place in `token_ids`, of beams, to which their tokens do not apply; none where the logits allow
            none.
    """

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    candidates: Mapping[int, list[Candidate]] = field(default_factory=dict)
