"""What may follow in a completion: constraints, which clear bits of a row's mask, and functions of the caller.

Threads fill the masks of a step while the model computes. A constraint that keeps state belongs to one sequence, and
brings the state up to date in `restrict`. A preemption needs nothing from it: tokens are computed again, but not
sampled again.
"""

import inspect
import os
import secrets
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmvllm.errors import RequestError
from mmvllm.sampling_params import SamplingParams
from mmvllm.scheduler.sequence import Constraint, Sequence

NUM_REMEMBERED = 4  # of each kind: a request has the same ones for all its prompts
_MAX_THREADS = 4  # that fill masks
_ALL_TOKENS = 0xFFFFFFFF  # a word of a mask that allows all its tokens


class ConstraintFailed(RequestError):
    """A constraint, or a function of the caller's, cannot go on; its request ends with this error."""


class AllowedTokens:
    """Only these tokens follow."""

    depends_on_text = False

    def __init__(self, token_ids: tuple[int, ...], vocab_size: int):
        """Raises RequestError for a token that the vocabulary does not have."""
        check_in_vocabulary("allowed_token_ids", token_ids, vocab_size)
        self._allowed = empty_mask(vocab_size)
        set_bits(self._allowed, token_ids)

    def restrict(self, seq: Sequence, allowed: np.ndarray) -> None:
        allowed &= self._allowed


class BadWords:
    """Token sequences that do not occur in a completion; the last token of one is forbidden after the others.

    Each word has two: at the beginning of the text or within a word, and after a space.
    """

    def __init__(self, words: tuple[str, ...], tokenizer: Any):
        encoded = {ids for word in words for ids in _encodings(word, tokenizer)}
        self.depends_on_text = any(len(ids) > 1 for ids in encoded)
        self._alone = sorted(ids[0] for ids in encoded if len(ids) == 1)
        self._begun: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)  # by the token before the last
        for ids in encoded:
            if len(ids) > 1:
                self._begun[ids[-2]].append(([*ids[:-1]], ids[-1]))

    def restrict(self, seq: Sequence, allowed: np.ndarray) -> None:
        token_ids, num_sampled = seq.token_ids, seq.num_tokens - seq.num_prompt_tokens
        begun = self._begun.get(token_ids[-1], ()) if num_sampled else ()
        ends = [last for before, last in begun if len(before) <= num_sampled and token_ids[-len(before) :] == before]
        clear_bits(allowed, self._alone + ends)


# Rabin-Karp: the beginnings of n-grams are kept as rolling hashes, so that memory does not depend on n. The base is
# random: whatever a client sends, two beginnings collide with a probability below n / 2**127.
_MODULUS = 2**127 - 1
_BASE = secrets.randbelow(_MODULUS)


class NoRepeatNgrams:
    """No n-gram occurs twice in prompt and completion, as transformers' `no_repeat_ngram_size`."""

    depends_on_text = True

    def __init__(self, size: int):
        self._num_before = size - 1  # tokens of an n-gram before its last one
        self._weight_of_oldest = pow(_BASE, self._num_before, _MODULUS)
        self._hash = 0  # of the last `_num_before` tokens, or of all if there are fewer
        self._followers: defaultdict[int, list[int]] = defaultdict(list)  # by the hash of the tokens before them
        self._num_seen = 0

    def restrict(self, seq: Sequence, allowed: np.ndarray) -> None:
        token_ids = seq.token_ids
        for end in range(self._num_seen, len(token_ids)):
            added = self._hash * _BASE + token_ids[end] + 1
            if end >= self._num_before:
                self._followers[self._hash].append(token_ids[end])
                added -= (token_ids[end - self._num_before] + 1) * self._weight_of_oldest
            self._hash = added % _MODULUS
        self._num_seen = len(token_ids)
        if len(token_ids) >= self._num_before:
            clear_bits(allowed, self._followers.get(self._hash, ()))


class ConstraintFactory:
    """Makes the constraints of sequences.

    Constraints without state are shared by all sequences with the same parameters, since lists of thousands of tokens
    and words take as long as a step.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._allowed_tokens = lru_cache(NUM_REMEMBERED)(partial(AllowedTokens, vocab_size=vocab_size))
        self._bad_words = lru_cache(NUM_REMEMBERED)(partial(BadWords, tokenizer=tokenizer))

    def constraints_of(self, params: SamplingParams) -> tuple[Constraint, ...]:
        """Return the constraints of one sequence; raises RequestError for tokens that the vocabulary does not have."""
        found: list[Constraint] = []
        if params.allowed_token_ids is not None:
            found.append(self._allowed_tokens(params.allowed_token_ids))
        if params.bad_words:
            found.append(self._bad_words(params.bad_words))
        if params.no_repeat_ngram_size:
            found.append(NoRepeatNgrams(params.no_repeat_ngram_size))
        return tuple(found)


def check_in_vocabulary(name: str, token_ids: Any, vocab_size: int) -> None:
    """Raise RequestError for the first token id of a parameter that does not exist."""
    if max(token_ids, default=0) >= vocab_size:
        token_id = next(token_id for token_id in token_ids if token_id >= vocab_size)
        message = f"{name} must have token ids of this model, in [0, {vocab_size}), got {token_id}"
        raise RequestError(message, param=name, value=token_id, limit=vocab_size - 1)


def empty_mask(vocab_size: int) -> np.ndarray:
    """A mask (ceil(V / 32),) uint32 that allows nothing."""
    return np.zeros(-(-vocab_size // 32), np.uint32)


def set_bits(mask: np.ndarray, token_ids: Any) -> None:
    ids = np.asarray(token_ids, np.int64)
    np.bitwise_or.at(mask, ids >> 5, _bits(ids))


def clear_bits(mask: np.ndarray, token_ids: Any) -> None:
    ids = np.asarray(token_ids, np.int64)
    np.bitwise_and.at(mask, ids >> 5, ~_bits(ids))


def _bits(token_ids: np.ndarray) -> np.ndarray:
    return np.left_shift(1, token_ids & 31).astype(np.uint32)


def _encodings(word: str, tokenizer: Any) -> list[tuple[int, ...]]:
    word = word.lstrip() or word
    alone, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}"))
    # A separate space token before the same tokens adds nothing.
    return [ids for ids in (alone, spaced) if ids and not (ids is spaced and spaced[1:] == alone)]


def apply_logits_processors(logits: Tensor, seq: Sequence) -> Tensor:
    """The logits (V,) float32 after all of a sequence's `logits_processors`; raises ConstraintFailed where one fails.

    A function takes (completion's token ids, logits) or (prompt's token ids, completion's token ids, logits), and
    returns logits (V,), which may be those that it got, changed.
    """
    for function in seq.sampling_params.logits_processors:
        try:
            made = function(*_processor_arguments(function, seq), logits)
        except Exception as error:
            raise _processor_failed(f"{_name(function)} raised {error!r}") from None
        if not _is_row_of_logits(made, logits):
            what = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            required = f"a tensor {list(logits.shape)}, dense and of real numbers"
            raise _processor_failed(f"{_name(function)} must return {required}, got {what}")
        logits = made.to(logits.device, torch.float32)
    return logits


def _processor_failed(reason: str) -> ConstraintFailed:
    return ConstraintFailed(f"logits_processors: {reason}", param="logits_processors")


def _is_row_of_logits(made: Any, logits: Tensor) -> bool:
    """Whether it can replace the logits: not a tensor without values, a sparse one, or one of complex numbers."""
    is_dense = isinstance(made, Tensor) and made.layout is torch.strided and not made.is_meta
    return is_dense and made.shape == logits.shape and not made.is_complex()


def _processor_arguments(function: Callable, seq: Sequence) -> list[list[int]]:
    takes_prompt = len(inspect.signature(function).parameters) == 3
    return [seq.prompt_token_ids, seq.completion_token_ids] if takes_prompt else [seq.completion_token_ids]


def _name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What may follow M of the sequences that get a token in a step.

    Args:
        seqs: M sequences.
        row_indices: (M,) int32, their rows of the step's logits.
        allowed: (M, ceil(V / 32)) uint32, as in `kernels/token_mask.py`.
        errors: why a sequence gets no token, by row index; its request ends.
    """

    seqs: list[Sequence]
    row_indices: np.ndarray
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
    """Fills masks while the model computes; a thread is started when it is first needed."""

    def __init__(self, vocab_size: int):
        self._num_words = -(-vocab_size // 32)
        self._num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="mmvllm-masks")

    def begin(self, row_indices: np.ndarray, seqs: list[Sequence]) -> PendingMasks:
        """Start to fill the masks of sequences whose logits will be in these rows."""
        masks = TokenMasks(
            seqs, row_indices.astype(np.int32), np.full((len(seqs), self._num_words), _ALL_TOKENS, np.uint32)
        )
        constrained = [i for i, seq in enumerate(seqs) if seq.constraints]
        parts = [constrained[i :: self._num_threads] for i in range(self._num_threads)]
        return PendingMasks(masks, [self._threads.submit(_fill_masks, masks, part) for part in parts if part])


def _fill_masks(masks: TokenMasks, indices: list[int]) -> None:
    for i in indices:
        try:
            for constraint in masks.seqs[i].constraints:
                constraint.restrict(masks.seqs[i], masks.allowed[i])
            if not masks.allowed[i].any():
                raise ConstraintFailed("no token can follow: every token is forbidden")
        except ConstraintFailed as error:
            masks.allowed[i] = 0
            masks.errors[int(masks.row_indices[i])] = error.detached()
