"""Computes prompt log-probabilities and pooled sums on the device; the host waits for the small results alone."""

from collections.abc import Callable

import torch
from torch import Tensor

from mmvllm.kernels.argmax import argmax_logsumexp
from mmvllm.scheduler.sampler_output import LogprobsLists
from mmvllm.scheduler.step_inputs import PromptOutputTokens
from mmvllm.utils.transfer import AsyncD2H, to_device

CHUNK_TOKENS = 64  # tokens whose logits are in memory at the same time

Head = Callable[[Tensor], Tensor]  # hidden states (R, C) -> logits (R, V)


def slice_sizes(wanted: PromptOutputTokens | None) -> list[int]:
    """The number of tokens in each call of the head."""
    number = 0 if wanted is None else len(wanted.targets)
    return [min(CHUNK_TOKENS, number - start) for start in range(0, number, CHUNK_TOKENS)]


def logprobs_of(logits: Tensor, token_ids: Tensor, number: int, asked: Tensor | None = None) -> tuple[Tensor, ...]:
    """Log-probabilities under the model's own distribution, before penalties and temperature.

    Logits (R, V) and a token for each row -> its log-probability and rank, (R,) each, and the log-probabilities and
    ids of the `number` most likely tokens, (R, max(1, number)) each. A rank is 1 where no token is more likely. With
    further tokens `asked` (R, A), there are their log-probabilities (R, A) as well.
    """
    total = argmax_logsumexp(logits)[1][:, None]
    own = logits.gather(1, token_ids[:, None])
    best = logits.topk(min(max(1, number), logits.shape[1]), dim=-1)
    ranks = (logits > own).sum(dim=1) + 1
    of_asked = () if asked is None else (logits.gather(1, asked) - total,)
    return (own - total).squeeze(1), ranks, best.values - total, best.indices, *of_asked


class PromptOutputComputation:
    """Prompt log-probabilities and pooled sums of one step: submitted at construction, awaited by `values`."""

    def __init__(self, hidden: Tensor, wanted: PromptOutputTokens, head: Head):
        """`hidden` (Q, C) are the hidden states of `wanted.token_indices`."""
        self._wanted, L = wanted, len(wanted.targets)
        tensors: list[Tensor] = []
        if L:
            targets = to_device(torch.from_numpy(wanted.targets), hidden.device)
            parts = zip(hidden[:L].split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
            found = [logprobs_of(head(rows), own, wanted.number) for rows, own in parts]
            tensors += [torch.cat(column) for column in zip(*found, strict=True)]
        if wanted.pooled_lens:
            sums = [rows.sum(dim=0, dtype=torch.float64) for rows in hidden[L:].split(wanted.pooled_lens)]
            tensors.append(torch.stack(sums))
        self._on_host = AsyncD2H(*tensors)

    def values(self) -> list[LogprobsLists | list[float]]:
        """Wait for the results of each chunk, in the order of `SchedulerOutput.prompt_output_chunks`."""
        lists, made, at = self._on_host.lists(), [], 0
        for length in self._wanted.logprob_lens:
            made.append(LogprobsLists(*(column[at : at + length] for column in lists[:4])))
            at += length
        return made + (lists[-1] if self._wanted.pooled_lens else [])


def compute_logits_part(hidden: Tensor, wanted: PromptOutputTokens, head: Head) -> None:
    """Compute a rank's share of the logits; rank 0 runs a `PromptOutputComputation`."""
    for rows in hidden[: len(wanted.targets)].split(CHUNK_TOKENS) if len(wanted.targets) else ():
        head(rows)
