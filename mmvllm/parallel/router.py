"""Which engine of data parallel serving computes a request: one that has much of it cached, within a bound on the load.

A request is known by keys: hashes of its prompt's leading blocks, chained as in the prefix cache
(`scheduler/block_manager.py`), and by its images, which the encoder cache holds whatever text stands before them. The
router remembers for each engine the keys it was given last. A request goes to the engine that saves the most tokens,
among those whose load is within the bound; for equal savings to the least loaded, then to the least recently chosen.

- The bound is that of consistent hashing with bounded loads (arXiv 1608.01350): a multiple of the mean load.
- Popular prefixes come to several engines, as in Preble (arXiv 2407.00023): a prefix or an image that an engine has
  served `COPY_AFTER` times attracts no more requests. The next one goes to the least loaded engine, which caches it as
  well. So a system prompt spreads to all engines, for one miss in `COPY_AFTER` requests until it has. The turns of a
  conversation have keys of their own beyond the system prompt, and stay together.
- What an engine has cached is estimated from what was sent to it, as in SGLang's cache-aware router: engines report
  nothing.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, pairwise
from threading import Lock

import numpy as np
from xxhash import xxh3_64_digest

from mmvllm.utils.arguments import check_int

BLOCK_TOKENS = 64  # of a key; short, so that a turn of a conversation nearly always adds a key
EXPECTED_TOKENS = 256  # of a completion, at most: few are as long as `max_tokens` allows
COPY_AFTER = 8  # requests for the same prefix on one engine
SPARE_REQUESTS = 4  # by which loads may differ at least: batched, so few do not delay each other

Placed = tuple[int, bytes]  # (offset of an item's placeholders in the prompt, digest or key)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the router knows of a request.

    Args:
        keys: of the leading full blocks of `BLOCK_TOKENS` tokens, in order. Equal keys mean equal prompts up to
            the end of the block, with equal items and an equal cache salt.
        cost: tokens to compute: the prompt and an estimate of the completion.
        items: (key, number of placeholder tokens) of each different item.
    """

    keys: tuple[bytes, ...]
    cost: int
    items: tuple[tuple[bytes, int], ...] = ()


def fingerprint(
    token_ids: Sequence[int], items: Sequence[Placed], cache_salt: str | None, max_tokens: int
) -> Fingerprint:
    """The fingerprint of a prompt whose placeholders are expanded; `items` are in the order of their offsets.

    Token ids that are not integers give no keys: the engine refuses the request and says why.
    """
    cost = len(token_ids) + min(max_tokens, EXPECTED_TOKENS)
    try:
        ids = np.asarray(token_ids, np.int64).ravel()
    except (TypeError, ValueError, OverflowError):
        return Fingerprint((), cost)
    # A collision of these hashes costs a cache miss at most: the caches of the engines compare more than them.
    placed = [(offset, xxh3_64_digest(digest)) for offset, digest in items]
    sizes = dict(zip([key for _, key in placed], _item_sizes(ids, placed), strict=True))
    return Fingerprint(tuple(_block_keys(ids, placed, cache_salt)), cost, tuple(sizes.items()))


def _block_keys(ids: np.ndarray, placed: list[Placed], cache_salt: str | None) -> Iterator[bytes]:
    """Chained, so that an item counts in the block where it begins and in all that follow."""
    data, width = ids.tobytes(), BLOCK_TOKENS * ids.itemsize
    begun: dict[int, bytes] = {}
    for offset, key in placed:
        block, start = divmod(offset, BLOCK_TOKENS)
        begun[block] = begun.get(block, b"") + bytes([start]) + key
    prefix = xxh3_64_digest(repr(cache_salt).encode())
    for i in range(len(ids) // BLOCK_TOKENS):
        prefix = xxh3_64_digest(prefix + data[i * width : (i + 1) * width] + begun.get(i, b""))
        yield prefix


def _item_sizes(ids: np.ndarray, placed: list[Placed]) -> list[int]:
    """Placeholder tokens of each item: equal ids, up to the next item."""
    if not placed:
        return []
    runs = np.append(np.flatnonzero(np.diff(ids)) + 1, len(ids))  # where runs of equal ids end
    offsets = [offset for offset, _ in placed]
    ends = runs[np.searchsorted(runs[:-1], offsets, side="right")].tolist()
    return [min(end, after) - offset for end, (offset, after) in zip(ends, pairwise([*offsets, len(ids)]), strict=True)]


class Router:
    """Chooses engines, of which all are up at first; any thread may call it.

    Whoever sends a request to the chosen engine calls `started`, and later `ended`, once for each `started`, also if
    the engine is lost in between or the request goes to another one.

    Args:
        max_imbalance: no engine is given a request that would raise its load above this multiple of the mean, or above
            the least load by `SPARE_REQUESTS` requests like it, whichever is more. Loads are tokens in flight.
        capacity: keys remembered of each engine, the most recently used: `BLOCK_TOKENS` tokens of its KV cache each,
            or an item. A key takes about 200 bytes.

    Raises ValueError for numbers that are too small.
    """

    def __init__(self, num_engines: int, *, max_imbalance: float = 1.5, capacity: int = 1 << 14):
        check_int("num_engines", num_engines)
        check_int("capacity", capacity)
        if not max_imbalance >= 1:
            raise ValueError(f"max_imbalance must be at least 1, got {max_imbalance!r}")
        self._max_imbalance = max_imbalance
        self._engines = [_EngineCaches(i, capacity) for i in range(num_engines)]
        self._turns = count(1)
        self._lock = Lock()

    def choose(self, fp: Fingerprint) -> int | None:
        """The engine for a request, by its index; None if no engine is up. Nothing changes until `started`."""
        with self._lock:
            up = [engine for engine in self._engines if engine.is_up]
            if not up:
                return None
            limit = self._limit([engine.load for engine in up], fp.cost)
            allowed = [engine for engine in up if engine.load + fp.cost <= limit]  # the least loaded always is
            return max(allowed, key=lambda engine: (engine.saved_tokens(fp), -engine.load, -engine.turn)).index

    def started(self, engine: int, fp: Fingerprint) -> None:
        """A request was sent to an engine, whose caches will hold it."""
        with self._lock:
            chosen = self._engines[engine]
            chosen.load += fp.cost
            chosen.turn = next(self._turns)
            if chosen.is_up:
                chosen.learn(fp)

    def ended(self, engine: int, fp: Fingerprint) -> None:
        """A request is no longer in flight, however it ended; its keys stay."""
        with self._lock:
            left = self._engines[engine].load - fp.cost
            assert left >= 0, f"engine {engine} ended more requests than it started"
            self._engines[engine].load = left

    def lost(self, engine: int) -> None:
        """An engine is gone, and with it what it cached; it is not chosen until it has `joined`."""
        with self._lock:
            self._engines[engine].set_up(False)

    def joined(self, engine: int) -> None:
        """An engine is up, and has nothing cached."""
        with self._lock:
            self._engines[engine].set_up(True)

    @property
    def loads(self) -> list[int]:
        """Tokens in flight of each engine."""
        return [engine.load for engine in self._engines]

    @property
    def num_keys(self) -> list[int]:
        """Keys remembered of each engine."""
        return [len(engine.uses) for engine in self._engines]

    def _limit(self, loads: list[int], cost: int) -> float:
        return max(self._max_imbalance * (sum(loads) + cost) / len(loads), min(loads) + SPARE_REQUESTS * cost)


class _EngineCaches:
    """The load of an engine, and what its caches should hold."""

    def __init__(self, index: int, capacity: int):
        self.index = index
        self.is_up = True
        self.load = 0
        self.turn = 0  # when it was last given a request
        # Key -> requests that found it the longest known prefix, or found the item; least recently used first. Of one
        # prompt the tail goes before the head, as in the block manager, so no block's key is without those before it.
        self.uses: OrderedDict[bytes, int] = OrderedDict()
        self._capacity = capacity

    def set_up(self, is_up: bool) -> None:
        self.is_up = is_up
        self.uses.clear()

    def saved_tokens(self, fp: Fingerprint) -> int:
        """Tokens that the caches save, of the prefix and of items; popular ones do not count."""
        depth = self._depth(fp.keys)
        parts = [*fp.items, *((key, depth * BLOCK_TOKENS) for key in fp.keys[:depth][-1:])]
        return sum(tokens for key, tokens in parts if self.uses.get(key, COPY_AFTER) < COPY_AFTER)

    def learn(self, fp: Fingerprint) -> None:
        """Count the uses of what is known of a request, and remember all of it."""
        items = [key for key, _ in fp.items]
        for key in [*fp.keys[: self._depth(fp.keys)][-1:], *items]:
            if key in self.uses:
                self.uses[key] += 1
        for key in chain(items, reversed(fp.keys)):
            self.uses.setdefault(key, 0)
            self.uses.move_to_end(key)
        while len(self.uses) > self._capacity:
            self.uses.popitem(last=False)

    def _depth(self, keys: tuple[bytes, ...]) -> int:
        """How many leading keys are known."""
        return bisect_left(keys, True, key=lambda key: key not in self.uses)
