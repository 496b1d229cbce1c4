"""Streams of many concurrent requests equal offline completions."""

import asyncio
import random
import threading
from itertools import chain

import pytest

from mmvllm import SamplingParams
from mmvllm.engine.output_processor import MAX_HELD
from mmvllm.entrypoints import async_llm
from mmvllm.errors import DeadlineExceeded, EngineBusy, RequestError, RequestFailed
from mmvllm.processors.videos.load import Load
from tests.helpers.engine.async_engines import (
    LONG,
    QUESTION,
    REQUESTS,
    SHORT,
    async_test,
    collect,
    wait_until_idle,
)
from tests.helpers.engine.requests import ask


@pytest.mark.essential
@pytest.mark.slow
@async_test
async def test_concurrent_streams_equal_the_offline_completions(engine, checkpoint, make_llm):
    expected = make_llm(checkpoint).generate_multimodal([r for r, _ in REQUESTS], [p for _, p in REQUESTS])
    results = await asyncio.gather(*(collect(engine, request, params) for request, params in REQUESTS))
    for want, (deltas, texts) in zip(expected, results, strict=True):
        output = deltas[-1].output
        assert [c.token_ids for c in output.completions] == [c.token_ids for c in want.completions]
        assert texts == [c.text for c in want.completions] == [c.text for c in output.completions]
        for index, completion in enumerate(want.completions):
            own = [delta for delta in deltas if delta.index == index]
            assert [*chain(*(delta.token_ids for delta in own))] == completion.token_ids
            assert all(delta.text for delta in own[:-1])
            assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + [completion.finish_reason]
            if completion.logprobs is not None:
                assert [*chain(*(delta.logprobs for delta in own))] == output.completions[index].logprobs
        assert len(deltas) > 2 and all(delta.output is None for delta in deltas[:-1])


@pytest.mark.slow
@async_test
async def test_no_part_of_a_stop_string_is_streamed(engine, checkpoint, make_llm):
    text = make_llm(checkpoint).generate_multimodal([QUESTION], LONG)[0].text
    for start in range(5, 40, 7):
        stop = text[start : start + 5]
        deltas, (whole,) = await collect(
            engine, QUESTION, SamplingParams(max_tokens=200, ignore_eos=True, stop=[stop, "never there"])
        )
        assert whole == text[: text.index(stop)] and deltas[-1].finish_reason == "stop"


@async_test
async def test_log_probabilities_that_a_delta_has_are_not_kept(engine):
    params = SamplingParams(max_tokens=100, ignore_eos=True, logprobs=2, n=2, stop=["a" * 9999])
    kept, _ = await collect(engine, QUESTION, params)
    deltas, texts = [], ["", ""]
    async for delta in engine.generate(QUESTION, params, keeps_logprobs=False):
        deltas.append(delta)
        texts[delta.index] += delta.text
        seqs = [seq for group in engine._thread._engine.scheduler.groups.values() for seq in group.seqs]
        assert all(len(seq.logprobs) < 2 * MAX_HELD for seq in seqs)
    last, want = deltas[-1].output, kept[-1].output
    for index, completion in enumerate(last.completions):
        own = [delta for delta in deltas if delta.index == index]
        assert [*chain(*(delta.token_ids for delta in own))] == completion.token_ids
        found = [*chain(*(delta.logprobs for delta in own))]
        assert [{*one} for one in found] == [{*one} for one in want.completions[index].logprobs]
        assert completion.logprobs is None and completion.cumulative_logprob == pytest.approx(
            sum(one[token_id] for one, token_id in zip(found, completion.token_ids, strict=True)), abs=1e-2
        )
    assert texts == [completion.text for completion in last.completions]


@async_test
@pytest.mark.parametrize("params", [{"logprobs": 2}, {"prompt_logprobs": 20, "max_tokens": 2}, {"n": 3}])
async def test_what_nobody_reads_ends_the_requests_that_have_most_of_it(engine, monkeypatch, params):
    """Also after the engine has finished them: a client that reads slowly could have any number of them."""
    monkeypatch.setattr(async_llm, "MAX_UNREAD_BYTES", 60_000)
    large = SamplingParams(**{"max_tokens": 50, "ignore_eos": True} | params)
    streams = [engine.generate(QUESTION, each, limits_unread=True) for each in (SHORT, *[large] * 6)]
    streams.append(engine.generate(QUESTION, large))  # of a caller that is trusted
    firsts = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    wait_until_idle(engine)  # which keeps the event loop from taking any
    errors = []
    for first, stream in zip(firsts, streams, strict=True):
        try:
            last = [await first, *[delta async for delta in stream]][-1]
            assert last.output.text
            errors.append(None)
        except RequestError as error:
            errors.append(str(error))
    assert errors[0] is errors[-1] is None and sum(error is not None for error in errors) >= 5
    assert all("are unread" in error for error in filter(None, errors)) and engine.num_requests == 0


@async_test
async def test_raw_prompts_are_strings_or_token_ids(engine, checkpoint, make_llm):
    prompt = "Count the shapes."
    want = make_llm(checkpoint).generate([prompt], SHORT)[0]
    for given in (prompt, engine.tokenizer(prompt)["input_ids"]):
        deltas, _ = await collect(engine, given, SHORT)
        assert deltas[-1].output.token_ids == want.token_ids


@async_test
async def test_settings_in_a_request_override_the_arguments(engine):
    request = {**QUESTION, "request_id": "mine", "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
    deltas, _ = await collect(engine, request, LONG)
    assert deltas[-1].request_id == "mine" and len(deltas[-1].output.token_ids) == 2


@pytest.mark.parametrize(
    ("request_", "keys", "message"),
    [
        (ask("x", colour="red"), {}, "unknown keys colour"),
        (ask(b"not an image", "x"), {}, "image 0: .*not an image"),
        (ask(7, "x"), {}, "image 0: cannot load an image from int"),
        (7, {}, "must be a dict"),
        ("", {}, "at least one token"),
        ([1, 10**9], {}, "token ids of a prompt must be integers in"),
        (QUESTION, {"request_id": 5}, "request_id must be str or None, got 5"),
        (QUESTION, {"params": {"temperature": -1}}, "temperature must be .*, got -1"),
        (QUESTION, {"params": {"heat": 1}}, "sampling_params"),
        (ask("word " * 2000), {}, "maximum context length is"),
        ({**QUESTION, "priority": "high"}, {}, "priority must be int, got 'high'"),
    ],
)
@async_test
async def test_an_invalid_request_fails_alone(engine, request_, keys, message):
    good = asyncio.create_task(collect(engine, QUESTION, SHORT))
    with pytest.raises(ValueError, match=message):
        await collect(engine, request_, keys.pop("params", SHORT), **keys)
    deltas, _ = await good
    assert len(deltas[-1].output.token_ids) == 6


@async_test
async def test_an_unexpected_exception_in_preparation_is_a_request_failed_error(engine, monkeypatch):
    with pytest.raises(RequestFailed, match="preparation failed: ZeroDivisionError"):
        await collect(engine, QUESTION, SHORT, load=Load(image=lambda source: 1 / 0))
    monkeypatch.setattr(engine._engine, "add", lambda *args, **keys: 1 / 0)
    with pytest.raises(RequestFailed, match="preparation failed: ZeroDivisionError"):
        await collect(engine, QUESTION, SHORT)
    monkeypatch.undo()
    await collect(engine, QUESTION, SHORT)


@async_test
async def test_a_request_id_in_flight_is_refused_and_may_be_reused_afterwards(engine):
    stream = engine.generate(QUESTION, LONG, "twice")
    await anext(stream)
    with pytest.raises(ValueError, match="'twice' is already in flight"):
        await collect(engine, QUESTION, SHORT, request_id="twice")
    await stream.aclose()
    deltas, _ = await collect(engine, QUESTION, SHORT, request_id="twice")
    assert len(deltas[-1].output.token_ids) == 6


@pytest.mark.slow
@async_test
async def test_the_finish_reason_of_each_completion_is_streamed_when_it_finishes(engine, checkpoint, make_llm):
    """The completions of a request with n > 1 finish independently."""
    sampling = {"n": 3, "max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 1}
    llm = make_llm(checkpoint)
    whole = llm.generate_multimodal([QUESTION], sampling)[0].completions
    # A token id that only the second completion contains.
    stop = next(token_id for token_id in whole[1].token_ids if token_id not in whole[0].token_ids + whole[2].token_ids)
    params = SamplingParams(**sampling, stop_token_ids=[stop])
    want = llm.generate_multimodal([QUESTION], params)[0]
    lengths = [len(completion.token_ids) for completion in want.completions]
    assert lengths[0] == lengths[2] == 60 > lengths[1]
    deltas, texts = await collect(engine, QUESTION, params)
    assert texts == [completion.text for completion in want.completions]
    assert [delta.index for delta in deltas if delta.finish_reason is not None] == [1, 0, 2]
    assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    after = deltas[next(place for place, delta in enumerate(deltas) if delta.finish_reason is not None) + 1 :]
    assert len(after) > 2 and 1 not in {delta.index for delta in after}
    for index, completion in enumerate(want.completions):
        own = [delta for delta in deltas if delta.index == index]
        assert [*chain(*(delta.token_ids for delta in own))] == completion.token_ids
        assert [*chain(*(delta.logprobs for delta in own))] == deltas[-1].output.completions[index].logprobs


def test_event_loops_in_several_threads_share_an_engine(engine, checkpoint, make_llm):
    want = make_llm(checkpoint).generate_multimodal([QUESTION], SHORT)[0].text
    texts = []
    threads = [
        threading.Thread(target=lambda: texts.append(asyncio.run(collect(engine, QUESTION, SHORT))[1][0]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == [want] * 4


def test_requests_of_a_closed_event_loop_are_aborted(engine):
    loop = asyncio.new_event_loop()
    stream = engine.generate(QUESTION, LONG)
    loop.run_until_complete(anext(stream))
    loop.close()  # the generator is not closed
    wait_until_idle(engine)
    asyncio.run(stream.aclose())


@pytest.mark.slow
@pytest.mark.thinned(1)
@pytest.mark.parametrize("seed", range(3))
@async_test
async def test_random_cancellations_and_errors_do_not_affect_other_requests(engine, checkpoint, make_llm, seed):
    """40 requests at random times; some are cancelled, aborted, time out or have an invalid image."""
    rng = random.Random(seed)
    wanted = make_llm(checkpoint).generate_multimodal([r for r, _ in REQUESTS], [p for _, p in REQUESTS])

    async def send(number: int) -> bool:
        which = rng.randrange(len(REQUESTS))
        event = rng.choice(["none", "none", "cancel", "abort", "timeout", "invalid"])
        request, params = REQUESTS[which]
        await asyncio.sleep(rng.random() * 0.5)
        delay, request_id = rng.random() * 0.2, f"request-{number}"
        keys = {"timeout": delay} if event == "timeout" else {}
        if event == "invalid":
            request = ask(b"not an image", "?")
        task = asyncio.create_task(collect(engine, request, params, request_id=request_id, **keys))
        if event in ("cancel", "abort"):
            await asyncio.sleep(delay)
            task.cancel() if event == "cancel" else await engine.abort(request_id)
        try:
            deltas, texts = await task
        except EngineBusy:
            return False
        except (asyncio.CancelledError, DeadlineExceeded, ValueError):
            assert event in ("cancel", "timeout", "invalid")
            return False
        if deltas[-1].finish_reason == "aborted":
            return False
        assert texts == [completion.text for completion in wanted[which].completions]
        return True

    completed = await asyncio.gather(*(send(number) for number in range(40)))
    assert any(completed) and not all(completed)
