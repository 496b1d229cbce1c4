"""Outputs computed from a prompt's hidden states, collected chunk by chunk: log-probabilities or a pooled vector.

Each token's hidden state is used once and in order, whatever chunks and preemptions there are. The prefix cache has no
hidden states, so it is not used for tokens whose outputs are still missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mmvllm.outputs import LogprobsById
from mmvllm.pooling_params import PoolingParams
from mmvllm.scheduler.sampler_output import LogprobsLists, token_logprobs


@dataclass(slots=True)
class PromptOutputs:
    """Tokens [next_token, end) still lack their outputs."""

    next_token: int
    end: int

    @property
    def is_complete(self) -> bool:
        return self.next_token >= self.end

    def tokens_in(self, start: int, end: int) -> range | None:
        """The tokens of [start, end) whose outputs are missing, or None."""
        tokens = range(max(start, self.next_token), min(end, self.end))
        return tokens or None


@dataclass(slots=True)
class PromptLogprobs(PromptOutputs):
    """Log-probabilities of the prompt's tokens; the hidden state of token i gives that of token i + 1.

    Args:
        number: of most likely tokens to return besides each token.
        logprobs: one entry per prompt token; None for the first, and for tokens that were not asked for.
    """

    number: int
    logprobs: list[LogprobsById | None] = field(init=False)

    def __post_init__(self) -> None:
        self.logprobs = [None] * (self.next_token + 1)

    def commit(self, tokens: range, found: LogprobsLists, token_ids: Sequence[int]) -> bool:
        """Keep the log-probabilities of the next tokens of a sequence; False if one is NaN."""
        assert tokens.start == self.next_token, f"tokens {tokens} were computed, the next is {self.next_token}"
        targets = token_ids[tokens.start + 1 : tokens.stop + 1]
        for target, logprob, rank, top, ids in zip(
            targets, found.logprobs, found.ranks, found.top, found.top_ids, strict=True
        ):
            self.logprobs.append(token_logprobs(target, logprob, rank, top[: self.number], ids[: self.number]))
        self.next_token = tokens.stop
        return not any(logprob != logprob for logprob in found.logprobs)


@dataclass(slots=True)
class PoolingState(PromptOutputs):
    """The sum of hidden states, in float64, so that it hardly depends on the chunks."""

    params: PoolingParams
    total: np.ndarray | None = None  # (C,)
    num_tokens: int = 0

    @classmethod
    def of(cls, params: PoolingParams, num_tokens: int) -> "PoolingState":
        return cls(num_tokens - 1 if params.pooling == "last" else 0, num_tokens, params)

    def commit(self, tokens: range, total: Sequence[float], token_ids: Sequence[int]) -> bool:
        """Add the sum of the next tokens; False if it is not finite."""
        assert tokens.start == self.next_token, f"tokens {tokens} were computed, the next is {self.next_token}"
        added = np.array(total)
        self.total = added if self.total is None else self.total + added
        self.num_tokens += len(tokens)
        self.next_token = tokens.stop
        return bool(np.isfinite(added).all())

    @property
    def vector(self) -> np.ndarray | None:
        """The result, once all tokens are added."""
        return self.params.vector(self.total, self.num_tokens) if self.is_complete else None
