"""Logits -> token ids, vectorised over the batch, on the logits' device.

A row's choice depends on its own logits, parameters and history alone: randomness is one uniform number per token, a
function of the sequence's seed and the token's index, and put through the inverse of the row's cumulative distribution.
So a seeded request gives the same text in any batch, and after a preemption.
"""

import numpy as np
import torch
from torch import Tensor

from mmvllm.engine.reading import Reading, logprobs_of
from mmvllm.engine.sampled import SampledTokens, TokenLogprobs, token_logprobs
from mmvllm.engine.sampling_rows import LOGPROBS, MIN_TOKENS, PENALTIES, RANDOM, SamplingRows
from mmvllm.engine.sequence import Sequence
from mmvllm.kernels.argmax import argmax
from mmvllm.kernels.penalties import count_tokens, penalize
from mmvllm.kernels.sampling import sample
from mmvllm.sampling_params import SamplingParams
from mmvllm.transfer import HostCopy, to_device


class Sampled:
    """One token per row: on the device once it is computed, on the host once `tokens` has waited for it."""

    def __init__(self, token_ids: Tensor, input_ids: Tensor, logprobs: "Logprobs | None" = None):
        """`token_ids` (R,) are -1 where the logits allow none."""
        self.input_ids = input_ids  # (R,), what the next step computes: any id where there is no token
        self.reading: Reading | None = None  # what the same step reads of prompts
        self._logprobs = logprobs
        self._on_host = HostCopy(token_ids, *(logprobs.tensors if logprobs else ()))

    def tokens(self) -> SampledTokens:
        """Wait for the tokens; the host waits for nothing else in a step."""
        token_ids, *tensors = self._on_host.lists()
        logprobs = self._logprobs.by_row(token_ids, *tensors) if self._logprobs else {}
        return SampledTokens(token_ids, logprobs, () if self.reading is None else self.reading.values())


class Sampler:
    """Samples one token per sequence, and never waits for the device.

    Each running sequence has a row: its parameters, and the counts of its tokens if it has penalties.
    """

    def __init__(self, eos_token_ids: frozenset[int], max_num_seqs: int, vocab_size: int, device: torch.device):
        self.eos_token_ids = eos_token_ids
        self._rows = SamplingRows(max_num_seqs, vocab_size, device)

    def enter(self, row: int, seq: Sequence) -> None:
        """A sequence starts in a row, or starts again after a preemption; whatever was there before is forgotten."""
        self._rows.enter(row, seq, self.eos_token_ids)

    @torch.inference_mode()
    def __call__(
        self, logits: Tensor, rows: np.ndarray, ends: np.ndarray, rows_on_device: Tensor | None = None
    ) -> Sampled:
        """One token for each row of logits (R, V), in any dtype of models.

        Args:
            rows: (R,) int32, of the sequences.
            ends: (R,) int32, the number of tokens that precede the sampled one in its sequence.
            rows_on_device: (2, R) int32, rows and ends on the device where they are there already.
        """
        needs = int(np.bitwise_or.reduce(self._rows.needs[rows])) if len(rows) else 0
        if rows_on_device is None and needs & (RANDOM | PENALTIES):
            rows_on_device = [to_device(torch.from_numpy(x), logits.device) for x in (rows, ends)]
        adjusted = self._adjusted(logits, rows, ends, rows_on_device, needs)
        token_ids = sample(adjusted, self._rows.on_device(), *rows_on_device) if needs & RANDOM else argmax(adjusted)
        # A sequence whose row has no token is about to end: any id will do for the step that is launched meanwhile.
        input_ids = token_ids.clamp(min=0)
        if needs & PENALTIES:
            count_tokens(self._rows.counts.tensor, self._rows.on_device(), rows_on_device[0], input_ids)
        return Sampled(token_ids, input_ids, self._logprobs(logits, rows, input_ids) if needs & LOGPROBS else None)

    def _adjusted(
        self, logits: Tensor, rows: np.ndarray, ends: np.ndarray, rows_on_device: Tensor | None, needs: int
    ) -> Tensor:
        """Logits after penalties, without the tokens that may not follow yet."""
        adjusted = logits
        if needs & PENALTIES:
            adjusted = penalize(logits, self._rows.counts.tensor, self._rows.on_device(), rows_on_device[0])
        if needs & MIN_TOKENS and (pairs := self._rows.forbidden(rows, ends)).size:
            places, ids = to_device(torch.from_numpy(pairs), logits.device)
            adjusted = logits.clone() if adjusted is logits else adjusted
            adjusted[places, ids] = float("-inf")
        return adjusted

    def _logprobs(self, logits: Tensor, rows: np.ndarray, token_ids: Tensor) -> "Logprobs":
        places = np.flatnonzero(self._rows.needs[rows] & LOGPROBS)
        return Logprobs(logits, token_ids, places, self._rows.num_logprobs[rows[places]])


class Logprobs:
    """Log-probabilities of the model's own distribution, before penalties and temperature, of some rows of logits."""

    def __init__(self, logits: Tensor, token_ids: Tensor, places: np.ndarray, numbers: np.ndarray):
        """Compute them at once, because logits of a CUDA graph are overwritten by the next.

        `places` (R',) of rows that get the chosen token's and those of the `numbers` (R',) most likely tokens.
        """
        self._places, self._numbers = places.tolist(), numbers.tolist()
        if len(places) < len(logits):
            at = to_device(torch.from_numpy(places), logits.device)
            logits, token_ids = logits[at], token_ids[at]
        self.tensors = logprobs_of(logits, token_ids, int(numbers.max()))  # on the device

    def by_row(self, token_ids: list[int], *columns: list) -> dict[int, TokenLogprobs]:
        """By row of the logits, from `tensors` on the host; none where there is no token."""
        found = {}
        for place, number, own, rank, top, ids in zip(self._places, self._numbers, *columns, strict=True):
            if (token_id := token_ids[place]) >= 0:
                found[place] = TokenLogprobs(own, token_logprobs(token_id, own, rank, top[:number], ids[:number]))
        return found


def trial(logits: Tensor) -> None:
    """Sample rows of logits (R, V) in the way that takes the most memory."""
    R, V = logits.shape
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0, logprobs=20)
    sampler = Sampler(frozenset(), R, V, logits.device)
    seq = Sequence([0], params, request_id="", block_size=1)
    for row in range(R):
        sampler.enter(row, seq)
    sampler(logits, np.arange(R, dtype=np.int32), np.ones(R, np.int32)).tokens()
