"""Hidden states of prompts -> log-probabilities and sums, on their device; the host waits for small results alone."""

from collections.abc import Callable

import torch
from torch import Tensor

from mmvllm.kernels.argmax import argmax_logsumexp
from mmvllm.scheduler.sampler_output import RowLogprobs
from mmvllm.scheduler.step_inputs import Reads
from mmvllm.utils.transfer import HostCopy, to_device

ROWS = 64  # whose logits exist at the same time

Head = Callable[[Tensor], Tensor]  # hidden states (R, C) -> logits (R, V)


def slice_sizes(reads: Reads | None) -> list[int]:
    """The number of rows in each call of the head."""
    number = 0 if reads is None else len(reads.targets)
    return [min(ROWS, number - start) for start in range(0, number, ROWS)]


def logprobs_of(logits: Tensor, token_ids: Tensor, number: int, asked: Tensor | None = None) -> tuple[Tensor, ...]:
    """Of the model's own distribution, before penalties and temperature.

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


class Reading:
    """What a step reads of prompts: computed at construction, on the host once `values` has waited for it."""

    def __init__(self, hidden: Tensor, reads: Reads, head: Head):
        """`hidden` (Q, C) are the rows of `reads.at`."""
        self._reads, L = reads, len(reads.targets)
        tensors: list[Tensor] = []
        if L:
            targets = to_device(torch.from_numpy(reads.targets), hidden.device)
            parts = zip(hidden[:L].split(ROWS), targets.split(ROWS), strict=True)
            found = [logprobs_of(head(rows), own, reads.number) for rows, own in parts]
            tensors += [torch.cat(column) for column in zip(*found, strict=True)]
        if reads.pooled_lens:
            sums = [rows.sum(dim=0, dtype=torch.float64) for rows in hidden[L:].split(reads.pooled_lens)]
            tensors.append(torch.stack(sums))
        self._on_host = HostCopy(*tensors)

    def values(self) -> list[RowLogprobs | list[float]]:
        """Of each chunk that is read, in the order of `Schedule.read_chunks`."""
        lists, made, at = self._on_host.lists(), [], 0
        for length in self._reads.logprob_lens:
            made.append(RowLogprobs(*(column[at : at + length] for column in lists[:4])))
            at += length
        return made + (lists[-1] if self._reads.pooled_lens else [])


def take_part(hidden: Tensor, reads: Reads, head: Head) -> None:
    """What ranks other than 0 do of a `Reading`: their part of the logits."""
    for rows in hidden[: len(reads.targets)].split(ROWS) if len(reads.targets) else ():
        head(rows)
