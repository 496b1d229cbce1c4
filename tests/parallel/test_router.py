"""The router's choices: affinity, the bound on imbalance, engines that are lost, and its accounting."""

import os
import subprocess
import sys
from itertools import takewhile
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmvllm import SamplingParams
from mmvllm.inputs import MultiModalItem, PlaceholderRange
from mmvllm.parallel.router import (
    BLOCK_TOKENS,
    COPY_AFTER,
    EXPECTED_TOKENS,
    SPARE_REQUESTS,
    Fingerprint,
    Router,
    fingerprint,
)
from mmvllm.scheduler.block_manager import BlockManager
from mmvllm.scheduler.sequence import Sequence

PLACEHOLDER = 9
IMAGE_TOKENS = 200


def text(seed: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 1000, size).tolist()


def of_text(*parts: tuple[int, int]) -> Fingerprint:
    """The fingerprint of a prompt of parts, each (seed, number of tokens)."""
    return fingerprint([token for part in parts for token in text(*part)], [], None, 16)


def of_image(digest: bytes, before: list[int], question: list[int]) -> Fingerprint:
    return fingerprint([*before, *[PLACEHOLDER] * IMAGE_TOKENS, *question], [(len(before), digest)], None, 16)


def send(router: Router, fp: Fingerprint, *, ends: bool = True) -> int:
    """Have the router place a request; it ends at once, or stays in flight."""
    engine = router.choose(fp)
    router.started(engine, fp)
    if ends:
        router.ended(engine, fp)
    return engine


def num_common(first: Fingerprint, second: Fingerprint) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first.keys, second.keys, strict=False)))


# Fingerprints.


def test_there_is_a_key_for_each_full_block_and_the_cost_is_bounded():
    prompt = text(0, 3 * BLOCK_TOKENS + 5)
    assert len(fingerprint(prompt, [], None, 7).keys) == 3
    assert fingerprint(prompt, [], None, 7).cost == len(prompt) + 7
    assert fingerprint(prompt, [], None, 10**6).cost == len(prompt) + EXPECTED_TOKENS
    assert fingerprint([], [], None, 1) == Fingerprint((), 1)


def test_keys_are_equal_up_to_the_first_block_that_differs():
    one, other = text(0, 5 * BLOCK_TOKENS), text(0, 5 * BLOCK_TOKENS)
    other[2 * BLOCK_TOKENS] += 1
    assert num_common(fingerprint(one, [], None, 1), fingerprint(other, [], None, 1)) == 2
    assert fingerprint(np.array(one), [], None, 1) == fingerprint(one, [], None, 1)


def test_salts_share_no_prefix():
    prompt = text(0, 2 * BLOCK_TOKENS)
    prints = [fingerprint(prompt, [], salt, 1) for salt in (None, "", "None", "a", "\ud800")]
    assert len({fp.keys[0] for fp in prints}) == len(prints)


def test_the_place_of_an_item_counts():
    prompt = [PLACEHOLDER] * BLOCK_TOKENS
    prints = [fingerprint(prompt, [(offset, b"A")], None, 1) for offset in (1, 2)]
    assert num_common(*prints) == 0


def test_items_have_keys_and_sizes_of_their_own():
    before, after = text(1, 20), text(2, 100)
    prompt = [*before, *[PLACEHOLDER] * 300, *after, *[PLACEHOLDER] * 50]
    fp = fingerprint(prompt, [(20, b"A"), (120, b"B"), (420, b"A")], "salt", 1)
    assert [tokens for _, tokens in fp.items] == [50, 200], "the first and the last item are one"
    alone = fingerprint([PLACEHOLDER] * 50, [(0, b"A")], None, 1)
    assert alone.items == fp.items[:1], "neither text nor salt counts for the encoder cache"


@pytest.mark.parametrize("wrong", [["a"], [None], [2**70], [[1], [1, 2]]])
def test_token_ids_that_are_not_integers_are_left_to_the_engine(wrong):
    assert fingerprint(wrong, [], None, 1) == Fingerprint((), len(wrong) + 1)


pieces = st.lists(st.sampled_from([("text", 64), ("text", 40), ("other", 24), (b"A", 90), (b"B", 90)]), max_size=6)


def prompt_of(parts) -> tuple[list[int], list[tuple[int, bytes]]]:
    """Token ids and (offset, digest) of parts: words, or images by their digests, one token apart."""
    token_ids, items = [], []
    for kind, size in parts:
        if isinstance(kind, bytes):
            items.append((len(token_ids), kind))
        token = PLACEHOLDER if isinstance(kind, bytes) else len(kind)
        token_ids += [token] * size + [1]
    return token_ids, items


def cached_blocks(manager: BlockManager, token_ids: list[int], items: list[tuple[int, bytes]], salt: str | None) -> int:
    mm_items = tuple(
        MultiModalItem("image", torch.empty(0), (1, 2, 2), digest, PlaceholderRange(offset, 90))
        for offset, digest in items
    )
    params = SamplingParams(max_tokens=1)
    seq = Sequence([*token_ids, 1], params, request_id="r", block_size=BLOCK_TOKENS, mm_items=mm_items, cache_salt=salt)
    hit = seq.num_computed_tokens = manager.attach_prefix(seq)
    manager.allocate(seq, seq.num_tokens - hit)
    seq.num_computed_tokens = seq.num_tokens
    manager.commit(seq)
    return hit // BLOCK_TOKENS


@settings(max_examples=200)
@given(pieces, pieces, st.sampled_from([None, "", "s"]), st.sampled_from([None, "", "s"]))
def test_equal_keys_are_equal_blocks_of_the_prefix_cache(first, second, salt, other_salt):
    manager = BlockManager(64, BLOCK_TOKENS)
    one, other = prompt_of(first), prompt_of(second)
    cached_blocks(manager, *one, salt)
    prints = fingerprint(*one, salt, 1), fingerprint(*other, other_salt, 1)
    assert num_common(*prints) == cached_blocks(manager, *other, other_salt)


# Affinity.


def test_a_conversation_stays_where_it_began():
    router = Router(4)
    talks = [[(seed, 300)] for seed in range(8)]
    homes = [send(router, of_text(*talk)) for talk in talks]
    assert sorted(homes) == [0, 0, 1, 1, 2, 2, 3, 3]
    for turn in range(1, 5):
        for seed, talk in enumerate(talks):
            talk.append((100 * turn + seed, 150))
        assert [send(router, of_text(*talk)) for talk in talks] == homes


def test_the_longest_prefix_wins():
    router = Router(3)
    for engine, sizes in enumerate(([(0, 300)], [(0, 300), (1, 300)], [(2, 900)])):
        router.started(engine, of_text(*sizes))
        router.ended(engine, of_text(*sizes))
    assert router.choose(of_text((0, 300), (1, 300), (3, 300))) == 1
    assert router.choose(of_text((2, 900), (3, 300))) == 2


def test_choosing_changes_nothing():
    router = Router(4)
    assert {router.choose(of_text((seed, 200))) for seed in range(20)} == {0}
    assert router.loads == router.num_keys == [0] * 4


def test_new_prompts_go_to_the_least_loaded_engine():
    router = Router(4)
    assert send(router, of_text((0, 2000)), ends=False) == 0
    others = [send(router, of_text((seed, 100)), ends=False) for seed in range(1, 13)]
    assert [others.count(engine) for engine in range(4)] == [0, 4, 4, 4]
    router = Router(3)
    sizes = (300, 100, 200, 150, 110, 100, 120)
    assert [send(router, of_text((i, size)), ends=False) for i, size in enumerate(sizes)] == [0, 1, 2, 1, 2, 1, 0]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_system_prompt_comes_to_be_known_by_all_engines(in_flight):
    router = Router(4, max_imbalance=100)
    engines = [send(router, of_text((0, 500), (seed, 150)), ends=not in_flight) for seed in range(1, 161)]
    counts = [engines.count(engine) for engine in range(4)]
    assert min(counts) >= 30, counts
    moved = sum(1 for i, engine in enumerate(engines) if engine not in engines[:i])
    assert moved == 4, "every engine computes it once"


def test_an_image_is_asked_about_where_it_was_encoded():
    router = Router(8)
    homes = [send(router, of_image(b"%d" % i, text(i, 30 + i), text(50 + i, 20))) for i in range(8)]
    assert sorted(homes) == list(range(8))
    again = [send(router, of_image(b"%d" % i, text(100 + i, 70 + i), text(150 + i, 20))) for i in range(8)]
    assert again == homes, "with other text before the image"


def test_a_prefix_and_an_image_count_together():
    router = Router(3)
    words = text(0, 3 * BLOCK_TOKENS)
    for engine, fp in enumerate((of_text((0, 3 * BLOCK_TOKENS)), of_image(b"A", text(1, 70), []), of_text((5, 64)))):
        router.started(engine, fp)
        router.ended(engine, fp)
    assert router.choose(of_image(b"A", words, [])) == 1, f"{IMAGE_TOKENS} tokens of the image, {len(words)} of words"
    assert router.choose(of_image(b"A", text(0, 3 * BLOCK_TOKENS) + text(2, 64), [])) == 1
    assert router.choose(of_image(b"B", words, [])) == 0


def test_a_hot_image_is_copied_to_all_engines():
    router = Router(4, max_imbalance=100)
    engines = [send(router, of_image(b"hot", [], text(seed, 80)), ends=False) for seed in range(200)]
    assert engines[:SPARE_REQUESTS] == [0] * SPARE_REQUESTS
    assert min(engines.count(engine) for engine in range(4)) >= 40
    first = [engines.index(engine) for engine in range(4)]
    assert max(first) <= 4 * COPY_AFTER


# The bound.


def test_an_engine_within_the_bound_is_preferred_to_one_with_the_prefix():
    router = Router(4)
    fp = of_text((0, 500))
    engines = [send(router, fp, ends=False) for _ in range(2 * SPARE_REQUESTS)]
    assert engines[:SPARE_REQUESTS] == [0] * SPARE_REQUESTS and engines[SPARE_REQUESTS] != 0
    router = Router(4, max_imbalance=100)
    assert [send(router, fp, ends=False) for _ in range(COPY_AFTER)] == [0] * COPY_AFTER


@pytest.mark.parametrize("argument", [{"max_imbalance": 0.9}, {"max_imbalance": float("nan")}, {"capacity": 0}])
def test_numbers_that_are_too_small_are_refused(argument):
    with pytest.raises(ValueError, match=rf"^{next(iter(argument))} must be .*at least 1, got .*"):
        Router(2, **argument)
    with pytest.raises(ValueError, match=r"num_engines must be .*, got 0"):
        Router(0)


# Engines that are lost.


def test_a_lost_engine_is_not_chosen_and_returns_with_empty_caches():
    router = Router(3)
    fp = of_text((0, 500))
    home = send(router, fp, ends=False)
    router.lost(home)
    assert router.num_keys == [0, 0, 0] and router.loads[home] == fp.cost, "until its requests have ended"
    router.ended(home, fp)
    second = send(router, fp)
    assert second != home
    router.joined(home)
    assert send(router, fp) == second, "the returned engine has nothing cached"
    assert send(router, of_text((1, 500))) != second
    assert home in {send(router, of_text((seed, 500)), ends=False) for seed in range(2, 5)}


def test_no_engine_is_chosen_while_none_is_up():
    router = Router(2)
    for engine in (0, 1):
        router.lost(engine)
    assert router.choose(of_text((0, 100))) is None
    router.joined(1)
    assert router.choose(of_text((0, 100))) == 1


def test_a_request_that_reaches_an_engine_after_its_loss_is_not_remembered():
    router, fp = Router(2), of_text((0, 500))
    router.lost(0)
    router.started(0, fp)
    router.ended(0, fp)
    assert router.num_keys == router.loads == [0, 0]


# Memory.


def test_memory_is_bounded_and_the_tail_of_a_prompt_is_forgotten_first():
    router = Router(2, capacity=10)
    whole = of_text((0, 8 * BLOCK_TOKENS))
    router.started(0, whole)
    router.started(0, of_text((1, 4 * BLOCK_TOKENS)))
    router.started(1, of_text((0, 5 * BLOCK_TOKENS), (2, 100)))
    assert router.num_keys == [10, 6]
    assert router.choose(whole) == 0, "it still knows 6 of the 8 blocks"
    router.started(0, of_text((3, 2 * BLOCK_TOKENS)))
    assert router.choose(whole) == 1, "and now 4"
    router.started(0, of_text((4, 100 * BLOCK_TOKENS)))
    assert router.num_keys[0] == 10


def test_what_was_used_last_is_remembered():
    router = Router(2, capacity=4)
    first, second, third = (of_text((seed, 2 * BLOCK_TOKENS)) for seed in range(3))
    for fp in (first, second, first, third):
        router.started(0, fp)
        router.ended(0, fp)
    assert [router.choose(fp) for fp in (first, second, third)] == [0, 1, 0]


def test_one_of_several_images_is_forgotten():
    router = Router(2, capacity=1)
    router.started(0, Fingerprint((), 1, ((b"a", 50), (b"b", 50))))
    assert router.num_keys == [1, 0]


# Determinism and accounting.

SEQUENCE_OF_CHOICES = """
from mmvllm.parallel.router import Router, fingerprint
router = Router(5)
for i in range(200):
    fp = fingerprint([*range(i % 7, 300 + i % 7), *range(i)], [(100, b"%d" % (i % 3))], "s", i)
    engine = router.choose(fp)
    router.started(engine, fp)
    print(engine, fp.keys, fp.items)
    if i % 3:
        router.ended(engine, fp)
"""


@pytest.mark.spawns
def test_choices_and_keys_do_not_depend_on_the_process():
    runs = [
        subprocess.run(
            [sys.executable, "-c", SEQUENCE_OF_CHOICES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and runs[0].count(b"\n") == 200


NUM_ENGINES, MAX_IMBALANCE, CAPACITY = 4, 1.5, 12
prompts = st.builds(
    lambda sizes, items, cost: Fingerprint(
        tuple(bytes(sizes[: i + 1]) for i in range(len(sizes))), cost, tuple((b"item" + i, 30) for i in items)
    ),
    st.lists(st.integers(0, 2), max_size=6),
    st.sets(st.sampled_from([b"a", b"b", b"c"])),
    st.integers(1, 1000),
)
events = st.one_of(
    st.tuples(st.just("send"), prompts),
    st.tuples(st.just("end"), st.integers(0, 1000)),
    st.tuples(st.just("lost"), st.integers(0, NUM_ENGINES - 1)),
    st.tuples(st.just("joined"), st.integers(0, NUM_ENGINES - 1)),
)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(events, max_size=80))
def test_loads_are_those_of_the_requests_in_flight(sequence):
    router = Router(NUM_ENGINES, max_imbalance=MAX_IMBALANCE, capacity=CAPACITY)
    running: list[tuple[int, Fingerprint]] = []
    up = set(range(NUM_ENGINES))
    for event, value in sequence:
        if event == "send" and up:
            loads = [router.loads[engine] for engine in up]
            running.append((send(router, value, ends=False), value))
            mean = (sum(loads) + value.cost) / len(up)
            assert running[-1][0] in up
            limit = max(MAX_IMBALANCE * mean, min(loads) + SPARE_REQUESTS * value.cost)
            assert router.loads[running[-1][0]] <= limit
        elif event == "send":
            assert router.choose(value) is None
        elif event == "end" and running:
            router.ended(*running.pop(value % len(running)))
        elif event in ("lost", "joined"):
            getattr(router, event)(value)
            up = up - {value} if event == "lost" else up | {value}
            assert router.num_keys[value] == 0
        in_flight = [sum(fp.cost for engine, fp in running if engine == i) for i in range(NUM_ENGINES)]
        assert router.loads == in_flight and max(router.num_keys) <= CAPACITY
    for engine, fp in running:
        router.ended(engine, fp)
    assert router.loads == [0] * NUM_ENGINES


def test_threads_may_share_a_router():
    router = Router(3, capacity=50)

    def work(first: int) -> None:
        for seed in range(first, first + 100):
            send(router, of_text((seed, 200)))

    threads = [Thread(target=work, args=(first,)) for first in (0, 50, 100, 150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert router.loads == [0, 0, 0] and max(router.num_keys) <= 50
