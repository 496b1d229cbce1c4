"""The tokens that a step sampled, on the host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


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
        errors: why there is no token, by place, where more is known than that there is none.
    """

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
