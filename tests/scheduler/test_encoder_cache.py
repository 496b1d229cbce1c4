"""The encoder cache alone: who holds what, in bytes, and what is dropped when."""

import pytest
import torch

from mmvllm.scheduler.encoder_cache import EncoderCache
from tests.helpers.engine.engines import run_at_once
from tests.helpers.engine.requests import ask, digests_of, noise_image
from tests.helpers.models.shapes import every_family

A, B, C = b"A" * 16, b"B" * 16, b"C" * 16
FIRST, SECOND = (1, 0), (2, 0)  # users: (seq_id, item)


def encoded(cache: EncoderCache, digest: bytes, num_rows: int, user=FIRST) -> None:
    assert cache.acquire(digest, num_rows, user)
    cache.mark_encoded([digest])


def test_what_could_ever_be_held():
    cache = EncoderCache(100, bytes_per_embed=10)
    assert cache.fits(10) and not cache.fits(11)


def test_an_item_is_counted_once_however_many_hold_it():
    cache = EncoderCache(100, 10)
    assert cache.acquire(A, 4, FIRST) and cache.acquire(A, 4, FIRST) and cache.acquire(A, 4, SECOND)
    assert cache.used_bytes == 40 and (cache.num_lookups, cache.num_hits) == (2, 1)
    cache.check({FIRST, SECOND})


def test_an_item_given_up_before_it_was_encoded_is_dropped():
    cache = EncoderCache(100, 10)
    cache.acquire(A, 4, FIRST)
    cache.acquire(A, 4, SECOND)
    cache.release(A, FIRST)
    assert cache.used_bytes == 40
    cache.release(A, SECOND)
    assert cache.used_bytes == 0 and cache.take_freed() == (A,) and cache.take_freed() == ()


def test_an_encoded_item_stays_until_its_room_is_needed():
    cache = EncoderCache(100, 10)
    encoded(cache, A, 6)
    cache.release(A, FIRST)
    assert cache.is_encoded(A) and cache.used_bytes == 60 and cache.take_freed() == ()
    assert cache.acquire(B, 4, SECOND), "both fit"
    assert cache.is_encoded(A)
    assert cache.acquire(C, 6, SECOND), "A has no users"
    assert not cache.is_encoded(A) and cache.take_freed() == (A,) and cache.used_bytes == 100
    cache.check({SECOND})


def test_items_that_are_held_are_never_dropped():
    cache = EncoderCache(100, 10)
    encoded(cache, A, 6)
    assert not cache.acquire(B, 5, SECOND)
    assert cache.is_encoded(A) and cache.used_bytes == 60 and cache.take_freed() == ()
    cache.check({FIRST})


def test_room_is_not_made_in_vain():
    """Dropping every item without users would not suffice: none is dropped."""
    cache = EncoderCache(100, 10)
    encoded(cache, A, 6)
    encoded(cache, B, 2, SECOND)
    cache.release(B, SECOND)
    assert not cache.acquire(C, 5, SECOND) and cache.is_encoded(B)


def test_the_least_recently_used_item_is_dropped_first():
    cache = EncoderCache(100, 10)
    for digest in (A, B):
        encoded(cache, digest, 5)
        cache.release(digest, FIRST)
    cache.acquire(A, 5, SECOND)
    cache.release(A, SECOND)
    assert cache.acquire(C, 5, FIRST) and cache.encoded_digests == {A} and cache.take_freed() == (B,)


def test_releasing_what_is_not_held_is_harmless():
    cache = EncoderCache(100, 10)
    cache.release(A, FIRST)
    encoded(cache, A, 5)
    cache.release(A, SECOND)
    cache.check({FIRST})


def test_check_finds_a_user_that_should_not_be():
    cache = EncoderCache(100, 10)
    cache.acquire(A, 5, FIRST)
    with pytest.raises(AssertionError, match="items held by"):
        cache.check(set())


@pytest.mark.thinned(2)
@every_family
def test_rows_are_freed_exactly_when_the_cache_drops_their_item(checkpoint, make_llm):
    """Room for one image: with each new one, the runner frees the rows of the one before, and no other."""
    llm = make_llm(checkpoint)
    questions = [ask(noise_image(56, 56, seed), "What?") for seed in range(3)]
    digests = [digests_of(llm.processor(question))[0] for question in questions]
    num_rows = llm.processor(questions[0]).num_media_tokens
    cache = llm.engine.encoder_cache
    cache.capacity_bytes = num_rows * cache.bytes_per_embed
    for question, digest in zip(questions, digests, strict=True):
        run_at_once(llm, [question])
        assert set(llm.engine.model_runner._encoder_outputs) == cache.encoded_digests == {digest}
        assert llm.engine.model_runner.has_encoder_output(digest)
    cache.capacity_bytes *= 3
    run_at_once(llm, questions)
    assert set(llm.engine.model_runner._encoder_outputs) == cache.encoded_digests == set(digests)
    shapes = {tuple(rows.shape) for rows in llm.engine.model_runner._encoder_outputs.values()}
    assert shapes == {(num_rows, llm.engine.model_config.mm_embed_size)}


@pytest.mark.thinned(2)
@every_family
def test_dropped_rows_are_encoded_again(checkpoint, make_llm):
    llm = make_llm(checkpoint, enable_prefix_caching=False)
    question = ask(noise_image(56, 56), "What?")
    model, encodings = llm.engine.model_runner.model, []
    encode = model.encode_patches
    model.encode_patches = lambda patches, layout: encodings.append(layout) or encode(patches, layout)
    want = run_at_once(llm, [question])
    assert run_at_once(llm, [question]) == want and len(encodings) == 1
    cache = llm.engine.encoder_cache
    for digest in cache.encoded_digests:
        cache._drop(digest)
    assert run_at_once(llm, [question]) == want and len(encodings) == 2
    assert all(isinstance(rows, torch.Tensor) for rows in llm.engine.model_runner._encoder_outputs.values())
