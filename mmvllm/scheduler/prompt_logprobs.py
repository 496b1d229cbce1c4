"""What is read of a prompt's hidden states while the prompt is computed, chunk by chunk.

Row i is the hidden state of token i. Rows are read once and in order, whatever chunks and preemptions there are; of
tokens that are still to be read, the prefix cache is of no use: it has keys and values, and no hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mmvllm.outputs import LogprobsById
from mmvllm.pooling_params import PoolingParams
from mmvllm.scheduler.sampler_output import LogprobsLists, token_logprobs


@dataclass(slots=True)
class PromptOutputs:
    """Rows [next_token, end) are still to be read."""

    next_token: int
    end: int

    @property
    def is_complete(self) -> bool:
        return self.next_token >= self.end

    def tokens_in(self, start: int, end: int) -> range | None:
        """Those of the tokens [start, end) that are to be read; None if there are none."""
        tokens = range(max(start, self.next_token), min(end, self.end))
        return tokens or None


@dataclass(slots=True)
class PromptLogprobs(PromptOutputs):
    """Log-probabilities of the prompt's tokens, where row i gives that of token i + 1.

    Args:
        number: of most likely tokens that are wanted in addition to each token.
        logprobs: by token of the prompt; None for the first, and for those before the first row that is read.
    """

    number: int
    logprobs: list[LogprobsById | None] = field(init=False)

    def __post_init__(self) -> None:
        self.logprobs = [None] * (self.next_token + 1)

    def commit(self, tokens: range, found: LogprobsLists, token_ids: Sequence[int]) -> bool:
        """Keep what was read of the next tokens; False if it is not numbers. `token_ids` are those of the sequence."""
        assert tokens.start == self.next_token, f"tokens {tokens} were read, the next is {self.next_token}"
        targets = token_ids[tokens.start + 1 : tokens.stop + 1]
        for target, logprob, rank, top, ids in zip(
            targets, found.logprobs, found.ranks, found.top, found.top_ids, strict=True
        ):
            self.logprobs.append(token_logprobs(target, logprob, rank, top[: self.number], ids[: self.number]))
        self.next_token = tokens.stop
        return not any(logprob != logprob for logprob in found.logprobs)


@dataclass(slots=True)
class PoolingState(PromptOutputs):
    """The sum of hidden states, in float64, so that it depends little on the chunks."""

    params: PoolingParams
    total: np.ndarray | None = None  # (C,)
    num_tokens: int = 0

    @classmethod
    def of(cls, params: PoolingParams, num_tokens: int) -> "PoolingState":
        return cls(num_tokens - 1 if params.pooling == "last" else 0, num_tokens, params)

    def commit(self, tokens: range, total: Sequence[float], token_ids: Sequence[int]) -> bool:
        """Add the sum of the next tokens; False if it is not numbers."""
        assert tokens.start == self.next_token, f"tokens {tokens} were read, the next is {self.next_token}"
        added = np.array(total)
        self.total = added if self.total is None else self.total + added
        self.num_tokens += len(tokens)
        self.next_token = tokens.stop
        return bool(np.isfinite(added).all())

    @property
    def vector(self) -> np.ndarray | None:
        """What the request returns, once all tokens are read."""
        return self.params.vector(self.total, self.num_tokens) if self.is_complete else None
