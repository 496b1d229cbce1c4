"""A grammar that takes long to compile keeps only requests with new grammars waiting."""

import asyncio
import threading

import numpy as np
import pytest

from mmvllm import SamplingParams
from mmvllm.errors import DeadlineExceeded, RequestError
from mmvllm.sampling.grammar import MAX_COMPILED
from mmvllm.sampling.grammar_matcher import TakesLonger
from tests.helpers.engine.async_engines import QUESTION, SHORT, async_test, collect, wait_until_idle
from tests.helpers.engine.requests import ask

pytest.importorskip("llguidance")


def matching(expression: str) -> SamplingParams:
    return SamplingParams(structured={"regex": expression}, max_tokens=12)


@pytest.fixture
def may_end():
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def compiling(engine, may_end, monkeypatch):
    """The expressions that have begun to compile; "slow" takes until `may_end`."""
    begun, compile_ = [], engine._engine.grammars._compile

    def slow(params):
        begun.append(params.regex)
        if params.regex == "slow":
            assert may_end.wait(60)
        return compile_(params)

    monkeypatch.setattr(engine._engine.grammars, "_compile", slow)
    return begun


@async_test
async def test_other_requests_do_not_wait(engine, compiling, may_end):
    _, (known,) = await collect(engine, ask("Hello"), matching("kno+wn"))
    many = [asyncio.create_task(collect(engine, ask("Hello"), matching("slow"))) for _ in range(6)]
    waits = asyncio.create_task(collect(engine, ask("Hello"), matching("waits")))
    left = asyncio.create_task(collect(engine, ask("Hello"), matching("left")))
    while "slow" not in compiling:
        await asyncio.sleep(0.01)
    await asyncio.gather(*(collect(engine, QUESTION, SHORT) for _ in range(3)))
    assert await engine.tokenize("Hello") != []
    assert (await collect(engine, ask("Hello"), matching("kno+wn")))[1] == [known]
    with pytest.raises(DeadlineExceeded):
        await collect(engine, ask("Hello"), matching("late"), timeout=0.05)
    assert not waits.done() and not any(task.done() for task in many)
    for task in (*many, left):
        task.cancel()
    await asyncio.gather(*many, left, return_exceptions=True)
    may_end.set()
    assert (await waits)[1] == ["waits"]
    assert set(compiling) == {"kno+wn", "slow", "waits"}  # nothing was begun for those who have gone
    wait_until_idle(engine)


@async_test
async def test_a_grammar_that_takes_longer_is_tried_apart(engine, may_end, monkeypatch):
    slow_ones, check = [], engine._engine.grammars.check

    def checked(params, is_quick=False):
        if params is not None and params.regex.startswith("slow") and is_quick:
            raise TakesLonger
        if params is not None and params.regex.startswith("slow"):
            slow_ones.append(params.regex)
            assert may_end.wait(60)
        check(params)

    monkeypatch.setattr(engine._engine.grammars, "check", checked)
    slow = [asyncio.create_task(collect(engine, ask("Hello"), matching(f"slow{number}"))) for number in range(4)]
    while not slow_ones:
        await asyncio.sleep(0.01)
    for number in range(4):
        assert (await collect(engine, ask("Hello"), matching(f"quick{number}")))[1] == [f"quick{number}"]
    assert slow_ones == ["slow0"] and not any(task.done() for task in slow)
    may_end.set()
    assert [(await task)[1] for task in slow] == [[f"slow{number}"] for number in range(4)]


@async_test
async def test_every_form_of_a_request_may_have_a_new_grammar(engine):
    async def fetched():
        return ask("Hello")

    own = {**ask("Hello"), "request_id": "own", "sampling_params": matching("b{3}")}
    given = [(ask("Hello"), matching("a{3}")), ("Hello", matching("a{4}")), ([5, 6], matching("a{5}"))]
    given += [(np.array([5, 6]), matching("a{6}")), (fetched, matching("a{7}")), (own, None)]
    texts = [(await collect(engine, request, params))[1] for request, params in given]
    assert texts == [["aaa"], ["aaaa"], ["aaaaa"], ["aaaaaa"], ["aaaaaaa"], ["bbb"]]


@async_test
async def test_a_grammar_that_cannot_be_enforced_is_refused_before_anything_is_fetched(engine):
    async def fetched():
        raise AssertionError

    params = SamplingParams(structured={"grammar": "start: nothing"})
    with pytest.raises(RequestError, match=r"structured\.grammar cannot be enforced"):
        await collect(engine, fetched, params)


@async_test
async def test_a_grammar_that_was_dropped_is_not_compiled_in_the_engines_thread(engine, monkeypatch):
    """Other grammars push a request's own grammar out of the cache while the request is fetched."""
    threads, compile_, may_go = {}, engine._engine.grammars._compile, asyncio.Event()

    def noted(params):
        threads.setdefault(params.regex, []).append(threading.current_thread().name)
        return compile_(params)

    async def fetched():
        await may_go.wait()
        return ask("Hello")

    monkeypatch.setattr(engine._engine.grammars, "_compile", noted)
    task = asyncio.create_task(collect(engine, fetched, matching("dropped")))
    while "dropped" not in threads:
        await asyncio.sleep(0.01)
    for number in range(MAX_COMPILED):
        engine._engine.grammars.check(matching(f"other{number}").structured)
    may_go.set()
    assert (await task)[1] == ["dropped"]
    assert len(threads["dropped"]) == 2 and all("engine" not in name for name in threads["dropped"])


@async_test
async def test_token_ids_may_be_changed_after_the_call(engine):
    ids = [5, 6, 7]
    stream = engine.generate({"prompt_token_ids": ids}, matching("tok{3}en"))
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    ids[:] = [1, 1]
    assert (await first).prompt_token_ids == [5, 6, 7]
    await stream.aclose()
