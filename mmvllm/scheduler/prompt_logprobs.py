"""What is read of a prompt's hidden states while the prompt is computed, chunk by chunk.

Row i is the hidden state of token i. Rows are read once and in order, whatever chunks and preemptions there are; of
rows that are still to be read, the prefix cache is of no use: it has keys and values, and no hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mmvllm.outputs import LogprobsById
from mmvllm.pooling_params import PoolingParams
from mmvllm.scheduler.sampler_output import RowLogprobs, token_logprobs


@dataclass(slots=True)
class PromptReads:
    """Rows [next_row, end) are still to be read."""

    next_row: int
    end: int

    @property
    def is_complete(self) -> bool:
        return self.next_row >= self.end

    def rows_in(self, start: int, end: int) -> range | None:
        """Those of the tokens [start, end) that are to be read; None if there are none."""
        rows = range(max(start, self.next_row), min(end, self.end))
        return rows or None


@dataclass(slots=True)
class LogprobReads(PromptReads):
    """Log-probabilities of the prompt's tokens, where row i gives that of token i + 1.

    Args:
        number: of most likely tokens that are wanted in addition to each token.
        logprobs: by token of the prompt; None for the first, and for those before the first row that is read.
    """

    number: int
    logprobs: list[LogprobsById | None] = field(init=False)

    def __post_init__(self) -> None:
        self.logprobs = [None] * (self.next_row + 1)

    def commit(self, rows: range, found: RowLogprobs, token_ids: Sequence[int]) -> bool:
        """Keep what was read of the next rows; False if it is not numbers. `token_ids` are those of the sequence."""
        assert rows.start == self.next_row, f"rows {rows} were read, the next is {self.next_row}"
        targets = token_ids[rows.start + 1 : rows.stop + 1]
        for target, logprob, rank, top, ids in zip(
            targets, found.logprobs, found.ranks, found.top, found.top_ids, strict=True
        ):
            self.logprobs.append(token_logprobs(target, logprob, rank, top[: self.number], ids[: self.number]))
        self.next_row = rows.stop
        return not any(logprob != logprob for logprob in found.logprobs)


@dataclass(slots=True)
class PooledReads(PromptReads):
    """The sum of hidden states, in float64, so that it depends little on the chunks."""

    params: PoolingParams
    total: np.ndarray | None = None  # (C,)
    num_rows: int = 0

    @classmethod
    def of(cls, params: PoolingParams, num_tokens: int) -> "PooledReads":
        return cls(num_tokens - 1 if params.pooling == "last" else 0, num_tokens, params)

    def commit(self, rows: range, total: Sequence[float], token_ids: Sequence[int]) -> bool:
        """Add the sum of the next rows; False if it is not numbers."""
        assert rows.start == self.next_row, f"rows {rows} were read, the next is {self.next_row}"
        added = np.array(total)
        self.total = added if self.total is None else self.total + added
        self.num_rows += len(rows)
        self.next_row = rows.stop
        return bool(np.isfinite(added).all())

    @property
    def vector(self) -> np.ndarray | None:
        """What the request returns, once all rows are read."""
        return self.params.vector(self.total, self.num_rows) if self.is_complete else None
