"""Logits -> token ids, vectorised over the batch, on the logits' device.

A row's choice depends on its own logits, parameters and history alone: randomness is one uniform number per token, a
function of the sequence's seed and the token's index, and put through the inverse of the row's cumulative distribution.
So a seeded request gives the same text in any batch, and after a preemption.
"""

from collections.abc import Mapping
from math import isfinite
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from mmvllm.errors import RequestError
from mmvllm.kernels.argmax import argmax
from mmvllm.kernels.penalties import count_tokens, penalize
from mmvllm.kernels.sampling import sample
from mmvllm.kernels.token_mask import mask_tokens
from mmvllm.outputs import Logprob
from mmvllm.sampling.constraints import ConstraintFailed, MaskThreads, PendingMasks, TokenMasks, apply_logits_processors
from mmvllm.sampling.prompt_logprobs import PromptOutputComputation, logprobs_of
from mmvllm.sampling.sampling_states import (
    BEAM,
    BIAS,
    LOGPROBS,
    MIN_TOKENS,
    PENALTIES,
    RANDOM,
    RESTRICTED,
    SamplingStates,
)
from mmvllm.sampling_params import SamplingParams
from mmvllm.scheduler.beam_search import Candidate
from mmvllm.scheduler.output import SchedulerOutput
from mmvllm.scheduler.sampler_output import SamplerOutput, TokenLogprobs, token_logprobs
from mmvllm.scheduler.sequence import Sequence
from mmvllm.utils.transfer import AsyncD2H, to_device

_NO_ERRORS: Mapping[int, str] = MappingProxyType({})


class AsyncSamplerOutput:
    """Sampled tokens that are being copied to the host; `tokens` waits for the copy."""

    def __init__(
        self,
        token_ids: Tensor,
        input_ids: Tensor,
        logprobs: "Logprobs | None" = None,
        candidates: "Candidates | None" = None,
        errors: Mapping[int, RequestError] = _NO_ERRORS,
    ):
        """`token_ids` (R,) are -1 where the logits allow none; `errors` have the reason, by row, where one is known."""
        self.input_ids = input_ids  # (R,), what the next step computes: any id where there is no token
        self.prompt_outputs: PromptOutputComputation | None = None  # of the same step
        self._logprobs, self._candidates, self._errors = logprobs, candidates, errors
        of_logprobs = logprobs.tensors if logprobs else ()
        self._num_of_logprobs = len(of_logprobs)
        self._on_host = AsyncD2H(token_ids, *of_logprobs, *(candidates.tensors if candidates else ()))

    def tokens(self) -> SamplerOutput:
        """Wait for the tokens; the host waits for nothing else in a step."""
        token_ids, *columns = self._on_host.lists()
        of_logprobs, of_candidates = columns[: self._num_of_logprobs], columns[self._num_of_logprobs :]
        return SamplerOutput(
            token_ids,
            logprobs=self._logprobs.by_row(token_ids, *of_logprobs) if self._logprobs else {},
            errors=self._errors,
            candidates=self._candidates.by_row(*of_candidates) if self._candidates else {},
            prompt_outputs=() if self.prompt_outputs is None else self.prompt_outputs.values(),
        )


class Sampler:
    """Samples one token per sequence, and never waits for the device.

    It keeps the parameters of each running sequence, and its token counts if it has penalties.
    """

    def __init__(self, eos_token_ids: frozenset[int], max_num_seqs: int, vocab_size: int, device: torch.device):
        self.eos_token_ids = eos_token_ids
        self._states = SamplingStates(max_num_seqs, vocab_size, device)
        self._mask_threads = MaskThreads(vocab_size)

    def add_sequence(self, req_index: int, seq: Sequence) -> None:
        """Set the state of a request index; called when a sequence starts, or restarts after a preemption."""
        self._states.add_sequence(req_index, seq, self.eos_token_ids)

    def begin_masks(self, req_indices: np.ndarray, step: SchedulerOutput) -> PendingMasks | None:
        """Start computing the token masks of the sampled sequences (R,); None if no sequence is constrained."""
        row_indices = np.flatnonzero(self._states.needs[req_indices] & RESTRICTED)
        if not row_indices.size:
            return None
        seqs = [chunk.seq for chunk in step.chunks if chunk.samples]
        return self._mask_threads.begin(row_indices, [seqs[row_index] for row_index in row_indices])

    @torch.inference_mode()
    def __call__(
        self,
        logits: Tensor,
        req_indices: np.ndarray,
        ends: np.ndarray,
        indices_on_device: Tensor | None = None,
        masks: TokenMasks | None = None,
    ) -> AsyncSamplerOutput:
        """One token for each row of logits (R, V), in any dtype of models.

        Args:
            req_indices: (R,) int32, request indices of the sequences.
            ends: (R,) int32, the number of tokens that precede the sampled one in its sequence.
            indices_on_device: (2, R) int32, `req_indices` and `ends` on the device, if they are there already.
            masks: allowed tokens, from `begin_masks`.
        """
        needs = int(np.bitwise_or.reduce(self._states.needs[req_indices])) if len(req_indices) else 0
        if indices_on_device is None and needs & (RANDOM | PENALTIES | BEAM):
            indices_on_device = [to_device(torch.from_numpy(x), logits.device) for x in (req_indices, ends)]
        candidates = self._candidates(logits, req_indices, ends, indices_on_device) if needs & BEAM else None
        adjusted = self._adjusted(logits, req_indices, ends, indices_on_device, needs)
        if masks is not None:
            adjusted = _restricted(_own(adjusted, logits), masks)
        token_ids = (
            sample(adjusted, self._states.on_device(), *indices_on_device) if needs & RANDOM else argmax(adjusted)
        )
        # A sequence without a token is about to end: any id will do for the step that is launched meanwhile.
        input_ids = token_ids.clamp(min=0)
        if needs & PENALTIES:
            count_tokens(self._states.counts.tensor, self._states.on_device(), indices_on_device[0], input_ids)
        logprobs = self._logprobs(logits, req_indices, input_ids) if needs & LOGPROBS else None
        errors = masks.errors if masks is not None else _NO_ERRORS
        return AsyncSamplerOutput(token_ids, input_ids, logprobs, candidates, errors)

    def _candidates(
        self, logits: Tensor, req_indices: np.ndarray, ends: np.ndarray, indices_on_device: Tensor
    ) -> "Candidates":
        """The candidates of beams. As in transformers, penalties apply to log-probabilities, not to logits."""
        row_indices = np.flatnonzero(self._states.needs[req_indices] & BEAM)
        at = to_device(torch.from_numpy(row_indices), logits.device)
        logprobs = logits[at].float().log_softmax(dim=-1)
        req_indices, ends, on_device = req_indices[row_indices], ends[row_indices], [x[at] for x in indices_on_device]
        needs = int(np.bitwise_or.reduce(self._states.needs[req_indices]))  # of beams alone
        adjusted = self._adjusted(logprobs, req_indices, ends, on_device, needs)
        return Candidates(adjusted, row_indices, self._states.num_candidates[req_indices])

    def _adjusted(
        self, logits: Tensor, req_indices: np.ndarray, ends: np.ndarray, indices_on_device: Tensor | None, needs: int
    ) -> Tensor:
        """Apply penalties and biases, and mask the end tokens of sequences below `min_tokens`."""
        adjusted = logits
        if needs & PENALTIES:
            adjusted = penalize(logits, self._states.counts.tensor, self._states.on_device(), indices_on_device[0])
        if needs & BIAS:
            adjusted = _own(adjusted, logits)
            pairs, values = self._states.biases(req_indices)
            row_indices, ids = to_device(torch.from_numpy(pairs), logits.device)
            adjusted[row_indices, ids] += to_device(torch.from_numpy(values), logits.device)
        if needs & MIN_TOKENS and (pairs := self._states.forbidden(req_indices, ends)).size:
            row_indices, ids = to_device(torch.from_numpy(pairs), logits.device)
            adjusted = _own(adjusted, logits)
            adjusted[row_indices, ids] = float("-inf")
        return adjusted

    def _logprobs(self, logits: Tensor, req_indices: np.ndarray, token_ids: Tensor) -> "Logprobs":
        row_indices = np.flatnonzero(self._states.needs[req_indices] & LOGPROBS)
        asked = [self._states.logprob_ids[i] for i in req_indices[row_indices]]
        return Logprobs(logits, token_ids, row_indices, self._states.num_logprobs[req_indices[row_indices]], asked)


def _own(adjusted: Tensor, logits: Tensor) -> Tensor:
    """Float32 logits that may be written to; the model's logits are kept for log-probabilities."""
    return logits.to(torch.float32, copy=True) if adjusted is logits else adjusted


def _restricted(logits: Tensor, masks: TokenMasks) -> Tensor:
    """Apply the caller's logits processors and the token masks, in place."""
    for seq, row_index in zip(masks.seqs, masks.row_indices.tolist(), strict=True):
        if seq.sampling_params.logits_processors and row_index not in masks.errors:
            try:
                logits[row_index] = apply_logits_processors(logits[row_index].clone(), seq)
            except ConstraintFailed as error:
                logits[row_index] = float("-inf")
                masks.errors[row_index] = error.detached()
    allowed, row_indices = (
        to_device(torch.from_numpy(x), logits.device) for x in (masks.allowed.view(np.int32), masks.row_indices)
    )
    mask_tokens(logits, allowed, row_indices)
    return logits


class Logprobs:
    """Log-probabilities of the model's own distribution, before penalties and temperature, of some rows of logits."""

    def __init__(
        self,
        logits: Tensor,
        token_ids: Tensor,
        row_indices: np.ndarray,
        numbers: np.ndarray,
        asked: list[tuple[int, ...]],
    ):
        """Compute them at once, because logits of a CUDA graph are overwritten by the next.

        `row_indices` (R',) are the rows that get log-probabilities: of the chosen token, of the `numbers` (R',) most
        likely tokens and of the tokens `asked`, both for each row.
        """
        self._row_indices, self._numbers, self._asked = row_indices.tolist(), numbers.tolist(), asked
        if len(row_indices) < len(logits):
            at = to_device(torch.from_numpy(row_indices), logits.device)
            logits, token_ids = logits[at], token_ids[at]
        ids = None
        if longest := max(map(len, asked)):
            padded = np.array([own + (0,) * (longest - len(own)) for own in asked], np.int64)
            ids = to_device(torch.from_numpy(padded), logits.device)
        self.tensors = logprobs_of(logits, token_ids, int(numbers.max()), ids)  # on the device

    def by_row(self, token_ids: list[int], *columns: list) -> dict[int, TokenLogprobs]:
        """By row of the logits, from `tensors` on the host; none where there is no token."""
        found = {}
        rows = zip(self._row_indices, self._numbers, self._asked, *columns, strict=True)
        for row_index, number, asked, own, rank, top, ids, *of_asked in rows:
            if (token_id := token_ids[row_index]) >= 0:
                made = token_logprobs(token_id, own, rank, top[:number], ids[:number])
                for asked_id, value in zip(asked, *of_asked, strict=False) if asked else ():
                    made.setdefault(asked_id, Logprob(value))
                found[row_index] = TokenLogprobs(own, made)
        return found


class Candidates:
    """The most likely next tokens of beams."""

    def __init__(self, logprobs: Tensor, row_indices: np.ndarray, numbers: np.ndarray):
        """Take the `numbers` (R',) largest of `logprobs` (R', V), the rows `row_indices` (R',) of the step's logits."""
        self._row_indices, self._numbers = row_indices.tolist(), numbers.tolist()
        best = logprobs.topk(int(numbers.max()), dim=-1)
        self.tensors = best.values, best.indices  # on the device

    def by_row(self, values: list, ids: list) -> dict[int, list[Candidate]]:
        """By row of the logits, best first, from `tensors` on the host; without tokens that cannot follow."""
        found = {}
        for row_index, number, logprobs, token_ids in zip(self._row_indices, self._numbers, values, ids, strict=True):
            pairs = zip(token_ids[:number], logprobs[:number], strict=True)
            found[row_index] = [Candidate(token_id, logprob) for token_id, logprob in pairs if isfinite(logprob)]
        return found


def trial(logits: Tensor) -> None:
    """Sample rows of logits (R, V) in the ways that take the most memory."""
    R, V = logits.shape
    for params in (
        SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0, logprobs=20),
        SamplingParams(beam_width=min(R, V), repetition_penalty=1.1),
    ):
        sampler = Sampler(frozenset(), R, V, logits.device)
        seq = Sequence([0], params, request_id="", block_size=1)
        for req_index in range(R):
            sampler.add_sequence(req_index, seq)
        sampler(logits, np.arange(R, dtype=np.int32), np.ones(R, np.int32)).tokens()
