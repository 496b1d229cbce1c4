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
from mmvllm.kernels.sampling import sample
from mmvllm.sampling_params import SamplingParams
from mmvllm.transfer import HostCopy, to_device

# Sampling at a lower temperature could only choose among tokens whose logits rounding has made equal.
GREEDY_BELOW = 1e-5


class Sampled:
    """One token per row: on the device once it is computed, on the host once `tokens` has waited for it."""

    def __init__(self, token_ids: Tensor, logits: Tensor, params: list[SamplingParams]):
        """`token_ids` (R,) are -1 where the logits allow none."""
        self._params = params
        self._wants_logprobs = any(p.logprobs is not None for p in params)
        self._logits = logits if self._wants_logprobs else None  # else they are freed before the next step allocates
        self._ids_on_host = HostCopy(token_ids)
        # A sequence whose row has no token is about to end: any id will do for the step that is launched meanwhile.
        self.input_ids = token_ids.clamp(min=0)  # (R,), what the next step computes

    @property
    def allows_launch_ahead(self) -> bool:
        """Whether the next step may be launched before `tokens` is called.

        Penalties count the tokens, and logprobs are read from logits that the next CUDA graph overwrites.
        """
        return not self._wants_logprobs and not any(_penalizes(p) for p in self._params)

    def tokens(self) -> list[SampledToken]:
        """Wait for the tokens; the host waits for nothing else in a step."""
        if not self._params:
            return []
        tokens = [SampledToken(None if token_id < 0 else token_id) for token_id in self._ids_on_host.tolist()]
        return _with_logprobs(tokens, self._logits, self._params) if self._wants_logprobs else tokens


class Sampler:
    """Writes nothing but its return value, and never waits for the device."""

    def __init__(self, eos_token_ids: frozenset[int]):
        self.eos_token_ids = eos_token_ids

    def __call__(self, logits: Tensor, seqs: list[Sequence], num_inflight_tokens: int = 0) -> Sampled:
        """One token for each row of logits (R, V) float32 and its sequence.

        `num_inflight_tokens` of each sequence were sampled before and are not appended to it yet.
        """
        params = [seq.sampling_params for seq in seqs]
        lengths = [seq.num_completion_tokens + num_inflight_tokens for seq in seqs]
        adjusted = self._forbid_early_end(_penalize(logits, seqs), params, lengths)
        largest, token_ids = adjusted.max(dim=-1)  # (R,)
        random_rows = [row for row, p in enumerate(params) if p.temperature >= GREEDY_BELOW]
        if random_rows:
            uniforms = [_uniform(seqs[row], lengths[row]) for row in random_rows]
            at = to_device(torch.tensor(random_rows), logits.device)  # a list as an index would wait for the device
            token_ids[at] = draw(adjusted[at], [params[row] for row in random_rows], uniforms)
        # A row with a NaN, or with nothing but -inf, has no token; the other rows are not affected.
        return Sampled(torch.where(largest.isfinite(), token_ids, -1), logits, params)

    def _forbid_early_end(self, logits: Tensor, params: list[SamplingParams], lengths: list[int]) -> Tensor:
        rows, columns = [], []
        for row, (p, length) in enumerate(zip(params, lengths, strict=True)):
            if length < p.min_tokens:
                ends = {*p.stop_token_ids, *(() if p.ignore_eos else self.eos_token_ids)}
                ends = [token_id for token_id in ends if token_id < logits.shape[-1]]
                rows += [row] * len(ends)
                columns += ends
        if not rows:
            return logits
        rows, columns = to_device(torch.tensor([rows, columns]), logits.device)
        logits = logits.clone()
        logits[rows, columns] = float("-inf")
        return logits


def _penalizes(p: SamplingParams) -> bool:
    return (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)


def _penalize(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """Repetition (arXiv 1909.05858), presence and frequency penalties, by (row, token) pairs that occurred."""
    pairs = []
    for row, seq in enumerate(seqs):
        p = seq.sampling_params
        if _penalizes(p):
            tokens = np.unique(seq.token_ids)
            generated = np.searchsorted(tokens, np.array(seq.completion_token_ids, dtype=np.int64))
            counts = np.bincount(generated, minlength=len(tokens))  # in the completion
            minus = p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
            pairs.append((np.full(len(tokens), row), tokens, np.full(len(tokens), p.repetition_penalty), minus))
    if not pairs:
        return logits
    rows, tokens, factor, minus = (
        to_device(torch.from_numpy(np.concatenate(x)), logits.device) for x in zip(*pairs, strict=True)
    )
    logits = logits.clone()
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / factor, values * factor) - minus
    largest = torch.finfo(logits.dtype).max
    logits[rows, tokens] = values.clamp(-largest, largest).to(logits.dtype)
    return logits


def _uniform(seq: Sequence, index: int) -> float:
    """The random number in [0, 1) of token `index` of this sequence's completion."""
    return xxhash.xxh32_intdigest(f"{seq.seed}:{index}".encode()) / 2**32


def draw(logits: Tensor, params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    """One token per row of logits (R, V), drawn as `sample` draws, at `uniforms` in [0, 1) -> (R,)."""
    V = logits.shape[-1]
    values = [(p.temperature, p.top_k if 0 < p.top_k < V else V, p.top_p, p.min_p) for p in params]
    # In one copy to the device; float64 represents each of them exactly.
    columns = torch.tensor([*zip(*values, strict=True), uniforms], dtype=torch.float64)  # (5, R)
    temperature, top_k, top_p, min_p, uniform = to_device(columns, logits.device)
    return sample(logits, temperature.float(), top_k.int(), top_p.float(), min_p.float(), uniform)


def _with_logprobs(tokens: list[SampledToken], logits: Tensor, params: list[SamplingParams]) -> list[SampledToken]:
    """Attach log-probabilities, of the model's own distribution before penalties and temperature, where asked for."""
    rows = [row for row, p in enumerate(params) if p.logprobs is not None and tokens[row].token_id is not None]
    if not rows:
        return tokens
    chosen = [tokens[row].token_id for row in rows]
    logprobs = logits[rows].log_softmax(dim=-1)
    best = logprobs.topk(min(max(params[row].logprobs for row in rows) or 1, logprobs.shape[-1]), dim=-1)
    own = logprobs.gather(1, torch.tensor(chosen, device=logits.device)[:, None])[:, 0].tolist()
    found = zip(rows, chosen, own, best.indices.tolist(), best.values.tolist(), strict=True)
    for row, token_id, logprob, top_ids, top_values in found:
        count = params[row].logprobs
        top = dict(zip(top_ids[:count], top_values[:count], strict=True))
        tokens[row] = SampledToken(token_id, logprob, {token_id: logprob} | top)
    return tokens
