"""Simulates data parallel serving, and compares the router with round robin and random choices.

    python examples/benchmarks/routing.py

Needs no model. Requests of four kinds go to 1 to 64 simulated engines, with a constant number in flight. Each engine
has a prefix cache of blocks and an encoder cache of images, which evict the least recently used entries.
`mmvllm.parallel.router` computes fingerprints and choices. For each kind, number of engines and policy, it prints:

- tokens: the share of prompt tokens that the engine found in its prefix cache.
- images: the share of images that were not encoded, because the prefix cache or the encoder cache had them.
- in flight: the load of the most loaded engine, in tokens of its requests in flight, over the mean; a mean over time.
- work: the tokens that the busiest engine computed, over the mean; cached tokens do not count.

"one cache" is a single engine with the caches of all: no policy can find more. The last line has all numbers as JSON.
"""

import argparse
import json
import random
import timeit
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from statistics import fmean

from mmvllm.cli.common import at_least_one
from mmvllm.parallel.router import Fingerprint, Router, fingerprint

BLOCK = 16  # tokens of a block of the simulated prefix cache
VOCABULARY, PLACEHOLDER = 150_000, 151_655
SYSTEM, PROMPT = 512, 80  # tokens, shared by all conversations and by all captions
OWN_WORDS, QUESTION, ANSWER = (16, 160), (16, 256), (32, 256)  # tokens
TURNS, USERS = 6, 6  # turns of a conversation; users who ask about an image
IMAGE = (256, 1280)  # tokens
HOT = 0.6  # share of requests for the hot image
POLICIES = ("router", "round robin", "random", "one cache")

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    token_ids: Tokens
    items: tuple[tuple[int, bytes], ...]  # (offset, digest)
    answer: Tokens
    fingerprint: Fingerprint
    blocks: tuple[int, ...]  # chained hashes of its blocks, for the simulated prefix cache

    @classmethod
    def of(cls, token_ids: Tokens, answer: Tokens, items: Iterable[tuple[int, bytes]] = ()) -> "SimulatedRequest":
        items = tuple(items)
        fp = fingerprint(token_ids, items, None, len(answer))
        return cls(token_ids, items, answer, fp, _blocks(token_ids + answer, items))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares and ratios, as the module's docstring defines them."""

    workload: str
    engines: int
    policy: str
    tokens: float
    images: float | None
    in_flight: float
    work: float


class SimulatedCache:
    """A cache of keys with sizes, which evicts the least recently used."""

    def __init__(self, capacity: int):
        self._capacity, self._used = capacity, 0
        self._sizes: OrderedDict[object, int] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def put(self, key: object, size: int) -> None:
        self._used += size - self._sizes.pop(key, 0)
        self._sizes[key] = size
        while self._used > self._capacity:
            self._used -= self._sizes.popitem(last=False)[1]


class SimulatedEngine:
    """The caches and counts of one engine."""

    def __init__(self, cache_tokens: int, image_tokens: int):
        self._prefixes, self._images = SimulatedCache(cache_tokens), SimulatedCache(image_tokens)
        self.work = self.prompt_tokens = self.cached_tokens = self.images = self.found_images = 0

    def compute(self, request: SimulatedRequest) -> None:
        known = next((i for i, block in enumerate(request.blocks) if block not in self._prefixes), len(request.blocks))
        num_tokens = len(request.token_ids)
        cached = min(known, (num_tokens - 1) // BLOCK) * BLOCK
        for key, size in request.fingerprint.items:
            self.found_images += key in self._images or request.items[-1][0] + size <= cached
            self._images.put(key, size)
        for block in reversed(request.blocks):
            self._prefixes.put(block, BLOCK)
        self.images += len(request.fingerprint.items)
        self.prompt_tokens += num_tokens
        self.cached_tokens += cached
        self.work += num_tokens - cached + len(request.answer)


def conversations(rng: random.Random, in_flight: int) -> Iterator[SimulatedRequest]:
    """Chats of six turns with one system prompt, in random order; twice as many chats as requests in flight."""
    system = _words(rng, SYSTEM)
    idle = [(system, 0)] * (2 * in_flight)
    busy: deque[tuple[Tokens, int]] = deque()
    while True:
        history, turn = idle.pop(rng.randrange(len(idle)))
        request = SimulatedRequest.of(history + _words(rng, QUESTION), _words(rng, ANSWER))
        yield request
        busy.append((request.token_ids + request.answer, turn + 1) if turn + 1 < TURNS else (system, 0))
        if len(busy) > in_flight:
            idle.append(busy.popleft())


def shared_images(rng: random.Random, in_flight: int) -> Iterator[SimulatedRequest]:
    """Images that six users each ask about; half of the users write other words before the image."""
    open_images: list[list] = []
    while True:
        while len(open_images) < in_flight:
            open_images.append([rng.randbytes(16), rng.randint(*IMAGE), USERS])
        image = open_images[rng.randrange(len(open_images))]
        digest, size, left = image
        before = _words(rng, OWN_WORDS) if rng.random() < 0.5 else []
        yield _about(before, digest, size, _words(rng, QUESTION), _words(rng, ANSWER))
        image[2] = left - 1
        if not image[2]:
            open_images.remove(image)


def captions(rng: random.Random, in_flight: int) -> Iterator[SimulatedRequest]:
    """One prompt for images that all differ."""
    prompt = _words(rng, PROMPT)
    while True:
        yield _about(prompt, rng.randbytes(16), rng.randint(*IMAGE), [], _words(rng, ANSWER))


def hot_image(rng: random.Random, in_flight: int) -> Iterator[SimulatedRequest]:
    """Questions about one image, mixed with captions of other images."""
    others = captions(rng, in_flight)
    while True:
        if rng.random() < HOT:
            yield _about([], b"hot", IMAGE[1], _words(rng, QUESTION), _words(rng, ANSWER))
        else:
            yield next(others)


WORKLOADS: dict[str, Callable[..., Iterator[SimulatedRequest]]] = {
    "conversations": conversations,
    "shared images": shared_images,
    "captions": captions,
    "hot image": hot_image,
}


class Simulation:
    """Engines behind a router, or behind another policy, for which a router only counts."""

    def __init__(self, policy: str, num_engines: int, options: argparse.Namespace):
        caches = num_engines if policy == "one cache" else 1
        num_engines //= caches
        self.engines = [SimulatedEngine(caches * options.cache, caches * options.images) for _ in range(num_engines)]
        self._router = Router(num_engines, **options.router)
        rng, turns = random.Random(options.seed), cycle(range(num_engines))
        others = {"random": lambda fp: rng.randrange(num_engines), "round robin": lambda fp: next(turns)}
        self._choose = others.get(policy, self._router.choose)
        self._running: deque[tuple[int, Fingerprint]] = deque()
        self._ratios: list[float] = []  # of the largest load to the mean load

    def run(self, requests: Sequence[SimulatedRequest], in_flight: int) -> None:
        """Run requests; each ends when `in_flight` others have started after it."""
        for request in requests:
            if len(self._running) == in_flight:
                self._router.ended(*self._running.popleft())
            chosen = self._choose(request.fingerprint)
            self._router.started(chosen, request.fingerprint)
            self._running.append((chosen, request.fingerprint))
            self.engines[chosen].compute(request)
            if len(self._running) == in_flight:
                self._ratios.append(_imbalance(self._router.loads))

    def measured(self, workload: str, num_engines: int, policy: str) -> Outcome:
        def total(name: str) -> int:
            return sum(getattr(engine, name) for engine in self.engines)

        tokens = total("cached_tokens") / total("prompt_tokens")
        images = total("found_images") / total("images") if total("images") else None
        work = _imbalance([engine.work for engine in self.engines])
        return Outcome(workload, num_engines, policy, tokens, images, fmean(self._ratios), work)


def simulate(workload: str, num_engines: int, options: argparse.Namespace) -> Iterator[Outcome]:
    """Yield the outcomes of all policies for the same requests."""
    in_flight = options.in_flight * num_engines
    source = WORKLOADS[workload](random.Random(options.seed), in_flight)
    requests = list(islice(source, options.requests * num_engines))
    for policy in POLICIES:
        simulation = Simulation(policy, num_engines, options)
        simulation.run(requests, in_flight)
        yield simulation.measured(workload, num_engines, policy)


def microseconds(num_engines: int, num_tokens: int = 4000, repeat: int = 500) -> dict[str, float]:
    """Return the fastest of some runs for a prompt with an image, known to all engines: fingerprint and choice."""
    token_ids = [*range(1000), *[PLACEHOLDER] * 1000, *range(num_tokens - 2000)]
    fp = fingerprint(token_ids, [(1000, b"image")], None, 256)
    router = Router(num_engines)
    for engine in range(num_engines):
        router.started(engine, fp)
    return {
        "fingerprint": _fastest(lambda: fingerprint(token_ids, [(1000, b"image")], None, 256), repeat),
        "choose": _fastest(lambda: router.choose(fp), repeat),
        "started and ended": _fastest(lambda: (router.started(0, fp), router.ended(0, fp)), repeat),
    }


def _fastest(function: Callable[[], object], repeat: int) -> float:
    return 1e6 * min(timeit.repeat(function, number=1, repeat=repeat))


def _imbalance(loads: list[int]) -> float:
    return max(loads) / fmean(loads)


def _about(before: Tokens, digest: bytes, size: int, question: Tokens, answer: Tokens) -> SimulatedRequest:
    return SimulatedRequest.of(before + [PLACEHOLDER] * size + question, answer, [(len(before), digest)])


def _words(rng: random.Random, size: int | tuple[int, int]) -> Tokens:
    return rng.choices(range(VOCABULARY), k=size if isinstance(size, int) else rng.randint(*size))


def _blocks(token_ids: Tokens, items: tuple[tuple[int, bytes], ...]) -> tuple[int, ...]:
    blocks, prefix = [], 0
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        begun = tuple(digest for offset, digest in items if start <= offset < start + BLOCK)
        prefix = hash((prefix, tuple(token_ids[start : start + BLOCK]), begun))
        blocks.append(prefix)
    return tuple(blocks)


def main() -> None:
    options = parse()
    measured = []
    for name, workload in WORKLOADS.items():
        print(f"\n{name}: {workload.__doc__}\n")
        print(f"{'engines':>7}  {'policy':<12}{'tokens':>8}{'images':>8}{'in flight':>11}{'work':>7}")
        for num_engines in options.engines:
            for one in simulate(name, num_engines, options):
                print(_row(one))
                measured.append(asdict(one))
    times = {num_engines: microseconds(num_engines) for num_engines in options.engines}
    print("\nmicroseconds for a prompt of 4,000 tokens that all engines know\n")
    for num_engines, parts in times.items():
        print(f"{num_engines:>7}  " + ", ".join(f"{name} {value:.0f}" for name, value in parts.items()))
    print(json.dumps({"measured": measured, "microseconds": times}))


def _row(one: Outcome) -> str:
    images = "-" if one.images is None else f"{one.images:.1%}"
    return f"{one.engines:>7}  {one.policy:<12}{one.tokens:>8.1%}{images:>8}{one.in_flight:>11.2f}{one.work:>7.2f}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = [1, 2, 4, 8, 16, 32, 64]
    parser.add_argument("--engines", type=at_least_one, nargs="+", default=sizes, help="(default: %(default)s)")
    parser.add_argument("--requests", type=at_least_one, default=200, help="requests per engine (default: %(default)s)")
    parser.add_argument("--in-flight", type=at_least_one, default=8, help="at each engine (default: %(default)s)")
    parser.add_argument("--cache", type=at_least_one, default=65_536, help="cached tokens (default: %(default)s)")
    parser.add_argument("--images", type=at_least_one, default=16_384, help="tokens of images (default: %(default)s)")
    parser.add_argument("--max-imbalance", type=float, help="limit of the router (default: the router's)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    options.router = {} if options.max_imbalance is None else {"max_imbalance": options.max_imbalance}
    return options


if __name__ == "__main__":
    main()
