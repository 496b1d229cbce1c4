"""Sampling parameters and token counts of the running sequences, on the host and on the device."""

import numpy as np
import torch
from torch import Tensor

from mmvllm.kernels.common.row_params import ROW_PARAMS, packed
from mmvllm.kernels.common.uniforms import stream_of
from mmvllm.sampling_params import SamplingParams
from mmvllm.scheduler.sequence import Sequence
from mmvllm.utils.transfer import to_device

# Sampling at a lower temperature could only choose among tokens whose logits rounding has made equal.
GREEDY_BELOW = 1e-5
# What a sequence needs, as bits.
RANDOM, PENALTIES, MIN_TOKENS, LOGPROBS, BIAS, RESTRICTED, BEAM = 1, 2, 4, 8, 16, 32, 64
_IN_PROMPT, _LARGEST_COUNT = -(2**15), 2**15 - 1  # of an int16 of `PenaltyCounts`


class SamplingStates:
    """The sampler's state, by request index. The device's copy is refreshed, in one transfer, before its next use."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device
        self.needs = np.zeros(max_num_seqs, np.uint8)
        self.num_logprobs = np.zeros(max_num_seqs, np.int32)
        self.logprob_ids: list[tuple[int, ...]] = [()] * max_num_seqs
        self.num_candidates = np.zeros(max_num_seqs, np.int32)  # of the next token of a beam
        self.min_ends = np.zeros(max_num_seqs, np.int32)  # tokens of prompt and completion before one may end it
        self.end_ids = [np.empty(0, np.int64)] * max_num_seqs  # forbidden before that
        self._bias_ids = [np.empty(0, np.int64)] * max_num_seqs
        self._bias_values = [np.empty(0, np.float32)] * max_num_seqs
        self.counts = PenaltyCounts(vocab_size, device)
        self._params = np.zeros(max_num_seqs, ROW_PARAMS)
        self._on_device = packed(self._params)
        self._is_stale = device.type != "cpu"

    def add_sequence(self, req_index: int, seq: Sequence, end_ids: frozenset[int]) -> None:
        """Write the parameters of a sequence whose tokens are all known; the model's `end_ids` end it, and its own."""
        p = seq.sampling_params
        needs = RANDOM if p.temperature >= GREEDY_BELOW else 0
        counts_row = 0
        if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0):
            needs |= PENALTIES
            counts_row = self.counts.start(req_index, seq)
        if p.min_tokens:
            needs |= MIN_TOKENS
            self.min_ends[req_index] = seq.num_prompt_tokens + p.min_tokens
            self.end_ids[req_index] = np.array([i for i in p.end_ids(end_ids) if i < self.vocab_size], np.int64)
        if p.logit_bias:
            needs |= BIAS
            self._bias_ids[req_index] = np.array([*p.logit_bias.keys()], np.int64)
            self._bias_values[req_index] = np.array([*p.logit_bias.values()], np.float32)
        if seq.constraints or p.logits_processors:
            needs |= RESTRICTED
        if p.beam_width is None and (p.num_logprobs is not None or p.chooses_by_logprob):
            needs |= LOGPROBS
            self.num_logprobs[req_index] = min(p.logprobs or 0, self.vocab_size)
            self.logprob_ids[req_index] = p.logprob_token_ids or ()
        if p.beam_width is not None:
            needs |= BEAM
            enough = max(p.beam_width + len(p.end_ids(end_ids)), p.logprobs or 0)
            self.num_candidates[req_index] = min(enough, self.vocab_size)
        self.needs[req_index] = needs
        self._params[req_index] = _row_params(p, seq, counts_row, self.vocab_size)
        self._is_stale = self.device.type != "cpu"  # there, host and device share the memory

    def on_device(self) -> Tensor:
        """(max_num_seqs, 12) int32."""
        if self._is_stale:
            self._on_device, self._is_stale = to_device(packed(self._params), self.device), False
        return self._on_device

    def forbidden(self, req_indices: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """(2, pairs): indices into `req_indices`, and token ids that may not follow there yet."""
        early = np.flatnonzero((self.needs[req_indices] & MIN_TOKENS > 0) & (ends < self.min_ends[req_indices]))
        return _pairs(early, [self.end_ids[i] for i in req_indices[early]])

    def biases(self, req_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(2, pairs): indices into `req_indices`, and token ids with a bias; and the biases (pairs,)."""
        row_indices = np.flatnonzero(self.needs[req_indices] & BIAS)
        pairs = _pairs(row_indices, [self._bias_ids[i] for i in req_indices[row_indices]])
        return pairs, np.concatenate([self._bias_values[i] for i in req_indices[row_indices]])


def _pairs(row_indices: np.ndarray, ids: list[np.ndarray]) -> np.ndarray:
    """(2, pairs): each index with each of its ids."""
    return np.stack([row_indices.repeat([len(i) for i in ids]), np.concatenate([row_indices[:0], *ids])])


class PenaltyCounts:
    """Token counts for `penalize`, of sequences with penalties; memory grows with their number."""

    def __init__(self, vocab_size: int, device: torch.device):
        # Row 0 is for sequences without penalties.
        self._pool = torch.zeros(1, vocab_size, dtype=torch.int16, device=device)
        self._pool_rows: dict[int, int] = {}  # by request index; kept for the next sequence there

    @property
    def tensor(self) -> Tensor:
        """(C, V) int16."""
        return self._pool

    @torch.inference_mode()
    def start(self, req_index: int, seq: Sequence) -> int:
        """Count a sequence's tokens and return its row in the tensor."""
        at = self._pool_rows.get(req_index, len(self._pool_rows) + 1)
        if at >= len(self._pool):
            self._pool = torch.cat([self._pool, torch.zeros_like(self._pool)])
        self._pool_rows[req_index] = at  # not before there is memory for it
        counts, tokens = np.zeros(self._pool.shape[1], np.int16), np.array(seq.token_ids)
        completion, number = np.unique(tokens[seq.num_prompt_tokens :], return_counts=True)
        counts[completion] = number.clip(max=_LARGEST_COUNT)
        counts[tokens[: seq.num_prompt_tokens]] |= _IN_PROMPT
        self._pool[at] = to_device(torch.from_numpy(counts), self._pool.device)
        return at


def _row_params(p: SamplingParams, seq: Sequence, counts_row: int, vocab_size: int) -> tuple:
    """A row of `ROW_PARAMS`, with finite values in float32; filters of greedy rows are off."""
    penalties = (min(max(p.repetition_penalty, 1e-30), 1e30), p.presence_penalty, p.frequency_penalty)
    is_random = p.temperature >= GREEDY_BELOW
    filters = (0.0, vocab_size, 1.0, 0.0)
    if is_random:
        top_k = p.top_k if 0 < p.top_k < vocab_size else vocab_size
        filters = (min(p.temperature, 1e30), top_k, p.top_p, p.min_p)
    stream = stream_of(seq.seed) if is_random else 0
    return (*filters, stream, seq.num_prompt_tokens, counts_row, *penalties, 0)
