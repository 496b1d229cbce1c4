"""Logits -> token ids, vectorised over the batch, on the logits' device.

A row's choice depends on its own logits, parameters and history alone: randomness is one uniform number per token,
hashed from the sequence's seed and the token's index, and put through the inverse of the row's cumulative
distribution. So a seeded request gives the same text in any batch, and after a preemption.
"""

import numpy as np
import torch
import xxhash
from torch import Tensor

from mmvllm.engine.scheduler import SampledToken
from mmvllm.engine.sequence import Sequence
from mmvllm.sampling_params import SamplingParams


class Sampler:
    """Writes nothing but its return value."""

    def __init__(self, eos_token_ids: frozenset[int]):
        self.eos_token_ids = eos_token_ids

    def __call__(self, logits: Tensor, seqs: list[Sequence]) -> list[SampledToken]:
        """One token for each row of logits (R, V) float32 and its sequence."""
        if not seqs:
            return []
        params = [seq.sampling_params for seq in seqs]
        adjusted = self._forbid_early_end(_penalize(logits, seqs), seqs)
        largest, token_ids = adjusted.max(dim=-1)  # (R,)
        random_rows = [row for row, p in enumerate(params) if p.temperature > 0]
        if random_rows:
            uniforms = [_uniform(seqs[row]) for row in random_rows]
            token_ids[random_rows] = draw(adjusted[random_rows], [params[row] for row in random_rows], uniforms)
        tokens = _with_logprobs(logits, token_ids, params)
        # A row with a NaN, or with nothing but -inf, has no token to give; the other rows are as good as ever.
        possible = largest.isfinite().tolist()
        return [token if ok else SampledToken(None) for token, ok in zip(tokens, possible, strict=True)]

    def _forbid_early_end(self, logits: Tensor, seqs: list[Sequence]) -> Tensor:
        rows, columns = [], []
        for row, seq in enumerate(seqs):
            p = seq.sampling_params
            if seq.num_completion_tokens < p.min_tokens:
                ends = {*p.stop_token_ids, *(() if p.ignore_eos else self.eos_token_ids)}
                ends = [token_id for token_id in ends if token_id < logits.shape[-1]]
                rows += [row] * len(ends)
                columns += ends
        if not rows:
            return logits
        logits = logits.clone()
        logits[rows, columns] = float("-inf")
        return logits


def _penalize(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """Repetition (arXiv 1909.05858), presence and frequency penalties, by (row, token) pairs that occurred."""
    pairs = []
    for row, seq in enumerate(seqs):
        p = seq.sampling_params
        if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0):
            tokens = np.unique(seq.token_ids)
            said = np.searchsorted(tokens, np.array(seq.completion_token_ids, dtype=np.int64))
            counts = np.bincount(said, minlength=len(tokens))  # in the answer
            minus = p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
            pairs.append((np.full(len(tokens), row), tokens, np.full(len(tokens), p.repetition_penalty), minus))
    if not pairs:
        return logits
    rows, tokens, factor, minus = (
        torch.from_numpy(np.concatenate(x)).to(logits.device) for x in zip(*pairs, strict=True)
    )
    logits = logits.clone()
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / factor, values * factor) - minus
    largest = torch.finfo(logits.dtype).max
    logits[rows, tokens] = values.clamp(-largest, largest).to(logits.dtype)
    return logits


def _uniform(seq: Sequence) -> float:
    """A number in [0, 1) that belongs to this sequence's next token."""
    return xxhash.xxh32_intdigest(f"{seq.seed}:{seq.num_completion_tokens}".encode()) / 2**32


def draw(logits: Tensor, params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    """One token per row of logits (R, V), by its inverse cumulative distribution at `uniforms` in [0, 1) -> (R,).

    Temperature, then top-k, top-p (arXiv 1904.09751) and min-p (2407.01082) as thresholds, in transformers' order.
    """

    def column(values, dtype=torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]  # (R, 1)

    # Shifted so that the largest is 0, and with temperatures in the range where float32 quotients stay finite: a
    # distribution beyond it is greedy, or uniform, all the same.
    temperature = column([min(max(p.temperature, 1e-6), 1e6) for p in params])
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    if any(0 < p.top_k < logits.shape[-1] or p.top_p < 1 for p in params):
        ordered = logits.sort(dim=-1, descending=True).values  # (R, V)
        vocab_size = logits.shape[-1]
        top_k = column([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], torch.int64)
        logits = logits.masked_fill(logits < ordered.gather(1, top_k - 1), float("-inf"))
        ordered = ordered.masked_fill(torch.arange(vocab_size, device=logits.device) >= top_k, float("-inf"))
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # of all more likely tokens; the first is always kept
        top_p = column([p.top_p for p in params])
        num_kept = ((before < top_p) | (top_p >= 1)).sum(dim=-1, keepdim=True).clamp(min=1)
        logits = logits.masked_fill(logits < ordered.gather(1, num_kept - 1), float("-inf"))
    if any(p.min_p > 0 for p in params):
        logits = logits.masked_fill(logits < column([p.min_p for p in params]).log(), float("-inf"))
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)  # (R, V), in vocabulary order
    wanted = column(uniforms, torch.float64) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


def _with_logprobs(logits: Tensor, token_ids: Tensor, params: list[SamplingParams]) -> list[SampledToken]:
    """Attach log-probabilities, of the model's own distribution before penalties and temperature, where asked for."""
    chosen = token_ids.tolist()
    rows = [row for row, p in enumerate(params) if p.logprobs is not None]
    tokens = [SampledToken(token_id) for token_id in chosen]
    if not rows:
        return tokens
    logprobs = logits[rows].log_softmax(dim=-1)
    best = logprobs.topk(min(max(params[row].logprobs for row in rows) or 1, logprobs.shape[-1]), dim=-1)
    own = logprobs.gather(1, token_ids[rows][:, None])[:, 0].tolist()
    for row, logprob, top_ids, top_values in zip(rows, own, best.indices.tolist(), best.values.tolist(), strict=True):
        count = params[row].logprobs
        top = dict(zip(top_ids[:count], top_values[:count], strict=True))
        tokens[row] = SampledToken(chosen[row], logprob, {chosen[row]: logprob} | top)
    return tokens
