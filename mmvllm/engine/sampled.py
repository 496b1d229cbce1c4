"""What a step has sampled, on the host."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one token: that of the token, and of it and the most likely tokens by id."""

    logprob: float
    logprobs: dict[int, float]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A token id per row, -1 where the logits allow none; `logprobs` by the rows of requests that asked for them."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
