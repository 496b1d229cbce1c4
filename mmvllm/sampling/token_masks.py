"""The constraints of a step's sequences, evaluated in threads while the model computes."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from mmvllm.errors import RequestError
from mmvllm.sampling.constraints import ConstraintFailed
from mmvllm.scheduler.sequence import Sequence

_MAX_THREADS = 4
_ALL = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What may follow M of the sequences that get a token in a step.

    Args:
        seqs: M sequences.
        places: (M,) int32, their rows of the step's logits.
        allowed: (M, ceil(V / 32)) uint32, as in `kernels/token_mask.py`.
        errors: why a sequence gets no token, by place; its request ends.
    """

    seqs: list[Sequence]
    places: np.ndarray
    allowed: np.ndarray
    errors: dict[int, RequestError] = field(default_factory=dict)


class PendingMasks:
    """Masks that threads are filling."""

    def __init__(self, masks: TokenMasks, parts: list[Future]):
        self._masks, self._parts = masks, parts

    def wait(self) -> TokenMasks:
        for part in self._parts:
            part.result()
        return self._masks


class MaskThreads:
    """Fills masks; a thread is started when it is first needed."""

    def __init__(self, vocab_size: int):
        self._num_words = -(-vocab_size // 32)
        self._num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="mmvllm-masks")

    def begin(self, places: np.ndarray, seqs: list[Sequence]) -> PendingMasks:
        """Start to fill the masks of sequences whose logits will be in these rows."""
        masks = TokenMasks(seqs, places.astype(np.int32), np.full((len(seqs), self._num_words), _ALL, np.uint32))
        constrained = [i for i, seq in enumerate(seqs) if seq.constraints]
        parts = [constrained[i :: self._num_threads] for i in range(self._num_threads)]
        return PendingMasks(masks, [self._threads.submit(_fill, masks, part) for part in parts if part])


def _fill(masks: TokenMasks, indices: list[int]) -> None:
    for i in indices:
        try:
            for constraint in masks.seqs[i].constraints:
                constraint.restrict(masks.seqs[i], masks.allowed[i])
            if not masks.allowed[i].any():
                raise ConstraintFailed("no token can follow: every token is forbidden")
        except ConstraintFailed as error:
            masks.allowed[i] = 0
            masks.errors[int(masks.places[i])] = error.detached()
