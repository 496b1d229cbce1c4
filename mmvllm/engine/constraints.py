"""What may follow in a completion: constraints that clear bits in the mask of a row of logits.

A constraint belongs to one sequence. What it keeps of the sequence's tokens it brings up to date in `restrict`, so a
preemption, which computes tokens again and samples none of them anew, needs nothing from it.
"""

import secrets
from collections import defaultdict
from typing import Any

import numpy as np

from mmvllm.engine.sequence import Constraint, Sequence
from mmvllm.errors import RequestError
from mmvllm.sampling_params import SamplingParams


class ConstraintFailed(RequestError):
    """A constraint, or a function of the caller's, cannot go on; its request ends with this error."""


class AllowedTokens:
    """Only these tokens follow."""

    depends_on_text = False

    def __init__(self, token_ids: tuple[int, ...], vocab_size: int):
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
        self._encoded = sorted(encoded)

    def restrict(self, seq: Sequence, allowed: np.ndarray) -> None:
        longest = max(map(len, self._encoded)) - 1
        start = max(seq.num_prompt_tokens, seq.num_tokens - longest)
        tail = tuple(seq.token_ids[start:])
        clear_bits(allowed, [ids[-1] for ids in self._encoded if tail[max(0, len(tail) - len(ids) + 1) :] == ids[:-1]])


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


def constraints_of(params: SamplingParams, tokenizer: Any, vocab_size: int) -> tuple[Constraint, ...]:
    """New constraints for one sequence; raises RequestError for tokens that the vocabulary does not have."""
    found: list[Constraint] = []
    check_in_vocabulary("logprob_token_ids", params.logprob_token_ids or (), vocab_size)
    if params.allowed_token_ids is not None:
        check_in_vocabulary("allowed_token_ids", params.allowed_token_ids, vocab_size)
        found.append(AllowedTokens(params.allowed_token_ids, vocab_size))
    if params.bad_words:
        found.append(BadWords(params.bad_words, tokenizer))
    if params.no_repeat_ngram_size:
        found.append(NoRepeatNgrams(params.no_repeat_ngram_size))
    return tuple(found)


def check_in_vocabulary(name: str, token_ids: Any, vocab_size: int) -> None:
    """Raise RequestError for the first token id of a parameter that does not exist."""
    for token_id in token_ids:
        if token_id >= vocab_size:
            message = f"{name} has {token_id}, token ids of this model are integers in [0, {vocab_size})"
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
    # A space that is a token of its own, before the same tokens, adds nothing.
    return [ids for ids in (alone, spaced) if ids and not (ids is spaced and spaced[1:] == alone)]
