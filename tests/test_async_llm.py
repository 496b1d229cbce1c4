"""Many at once on one engine: streams equal to offline answers, and every way in which a request can end."""

import asyncio
import contextlib
import gc
import random
import subprocess
import sys
import threading
import time
from functools import wraps
from itertools import chain

import pytest

from mmvllm import AsyncLLM, SamplingParams, async_llm, intake
from mmvllm.errors import DeadlineExceeded, EngineBusy, EngineFailed, EngineStopped, RequestFailed
from mmvllm.processors.load import load_image
from tests.helpers.engines import assert_engine_idle, unhurried
from tests.helpers.requests import ask, noise_image

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)  # of 10 ms each
QUESTION = ask(noise_image(80, 60), "Describe this image.")
REQUESTS = [
    (QUESTION, SamplingParams(max_tokens=40)),
    (ask("Count the shapes."), SamplingParams(max_tokens=40, ignore_eos=True)),
    (
        ask("One ", noise_image(60, 90, 1), " two ", noise_image(70, 70, 2)),
        SamplingParams(max_tokens=30, ignore_eos=True, n=3),
    ),
    (ask("And?"), SamplingParams(max_tokens=30, temperature=1.0, seed=5, n=2, logprobs=2, ignore_eos=True)),
    (ask("Again"), SamplingParams(max_tokens=30, temperature=1.5, seed=7, top_p=0.9, ignore_eos=True)),
]


def in_a_loop(test):
    """Run an async test; a hang fails it."""

    @wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 120))

    return run


@pytest.fixture(scope="module")
def shared(checkpoint):
    engine = unhurried(AsyncLLM(checkpoint, **options(max_num_seqs=4), max_waiting=8))
    yield engine
    asyncio.run(engine.shutdown())


@pytest.fixture
def engine(shared):
    """The module's engine, with nothing left in it afterwards."""
    yield shared
    wait_until_idle(shared)


@pytest.fixture
def make(checkpoint):
    """AsyncLLM(...) that is shut down after the test."""
    made = []

    def make(**engine_args) -> AsyncLLM:
        made.append(unhurried(AsyncLLM(checkpoint, **options(**engine_args))))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.shutdown(drain=False))


def options(**engine_args) -> dict:
    return {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 256, "skip_warmup": True} | engine_args


def wait_until(condition, what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, f"never {what}"
        time.sleep(0.005)


async def until(condition, what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


def wait_until_idle(engine: AsyncLLM) -> None:
    scheduler = engine._engine.scheduler
    wait_until(lambda: not engine._streams and not scheduler.groups, "idle")
    assert_engine_idle(engine._engine)
    assert not engine._thread.num_tracked


async def answer(engine: AsyncLLM, request, params=None, **keys):
    """All deltas of a request, and the texts of its answers."""
    deltas = [delta async for delta in engine.generate(request, params, **keys)]
    indices = sorted({delta.index for delta in deltas})
    return deltas, ["".join(delta.text for delta in deltas if delta.index == index) for index in indices]


class Gate:
    """A `load` that waits until it may."""

    def __init__(self):
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def __call__(self, source):
        self.is_reached.set()
        assert self.is_open.wait(20)
        return load_image(source)


@in_a_loop
async def test_streams_together_equal_the_offline_answers(engine, checkpoint, make_llm):
    expected = make_llm(checkpoint).generate_multimodal([r for r, _ in REQUESTS], [p for _, p in REQUESTS])
    results = await asyncio.gather(*(answer(engine, request, params) for request, params in REQUESTS))
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


@in_a_loop
async def test_a_stop_string_never_shows_not_even_half(engine, checkpoint, make_llm):
    text = make_llm(checkpoint).generate_multimodal([QUESTION], ENDLESS)[0].text
    for start in range(5, 40, 7):
        stop = text[start : start + 5]
        deltas, (whole,) = await answer(
            engine, QUESTION, SamplingParams(max_tokens=200, ignore_eos=True, stop=[stop, "never there"])
        )
        assert whole == text[: text.index(stop)] and deltas[-1].finish_reason == "stop"


@in_a_loop
async def test_raw_prompts_are_strings_or_token_ids(engine, checkpoint, make_llm):
    prompt = "Count the shapes."
    want = make_llm(checkpoint).generate([prompt], SHORT)[0]
    for given in (prompt, engine.tokenizer(prompt)["input_ids"]):
        deltas, _ = await answer(engine, given, SHORT)
        assert deltas[-1].output.token_ids == want.token_ids


@in_a_loop
async def test_a_request_brings_its_own_settings(engine):
    request = {**QUESTION, "request_id": "mine", "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
    deltas, _ = await answer(engine, request, ENDLESS)
    assert deltas[-1].request_id == "mine" and len(deltas[-1].output.token_ids) == 2


@pytest.mark.parametrize(
    ("request_", "keys", "message"),
    [
        (ask("x", colour="red"), {}, "unknown keys colour"),
        (ask(b"not a picture", "x"), {}, "image 0: .*not an image"),
        (ask(7, "x"), {}, "image 0: cannot load an image from int"),
        (7, {}, "must be a dict"),
        ("", {}, "at least one token"),
        ([1, 10**9], {}, "token ids are integers"),
        (QUESTION, {"request_id": 5}, "request_id is 5"),
        (QUESTION, {"params": {"temperature": -1}}, "temperature is -1"),
        (QUESTION, {"params": {"heat": 1}}, "sampling_params"),
        (ask("word " * 2000), {}, "max_model_len is"),
        ({**QUESTION, "priority": "high"}, {}, "priority is 'high'"),
    ],
)
@in_a_loop
async def test_a_bad_request_fails_alone(engine, request_, keys, message):
    good = asyncio.create_task(answer(engine, QUESTION, SHORT))
    with pytest.raises(ValueError, match=message):
        await answer(engine, request_, keys.pop("params", SHORT), **keys)
    deltas, _ = await good
    assert len(deltas[-1].output.token_ids) == 6


@in_a_loop
async def test_a_mistake_in_preparation_is_no_fault_of_the_request(engine, monkeypatch):
    with pytest.raises(RequestFailed, match="preparation failed: ZeroDivisionError"):
        await answer(engine, QUESTION, SHORT, load=lambda source: 1 / 0)
    monkeypatch.setattr(engine._engine, "add", lambda *args, **keys: 1 / 0)
    with pytest.raises(RequestFailed, match="preparation failed: ZeroDivisionError"):
        await answer(engine, QUESTION, SHORT)
    monkeypatch.undo()
    await answer(engine, QUESTION, SHORT)


@in_a_loop
async def test_an_id_in_flight_is_refused_and_free_again_afterwards(engine):
    stream = engine.generate(QUESTION, ENDLESS, "twice")
    await anext(stream)
    with pytest.raises(ValueError, match="'twice' is already in flight"):
        await answer(engine, QUESTION, SHORT, request_id="twice")
    await stream.aclose()
    deltas, _ = await answer(engine, QUESTION, SHORT, request_id="twice")
    assert len(deltas[-1].output.token_ids) == 6


async def _at_stage(engine: AsyncLLM, stage: str, others: contextlib.AsyncExitStack):
    """A task whose request "it" has come so far, and no farther for now."""
    gate = Gate()
    others.callback(gate.is_open.set)
    if stage in ("queued for preparation", "waiting in the engine"):
        for _ in range(8 if stage == "queued for preparation" else 4):
            load = gate if stage == "queued for preparation" else load_image
            blocker = engine.generate(QUESTION, ENDLESS, load=load)
            task = asyncio.create_task(anext(blocker))
            others.push_async_callback(_close, task, blocker)
            if stage == "waiting in the engine":
                await task
    load = gate if stage == "while it is prepared" else load_image
    task = asyncio.create_task(answer(engine, QUESTION, ENDLESS, request_id="it", load=load))
    stats = engine._engine.scheduler.groups
    if stage == "while it is prepared":
        await until(gate.is_reached.is_set, "prepared")
    elif stage == "waiting in the engine":
        await until(lambda: "it" in stats, "in the engine")
    elif stage == "in mid-answer":
        await until(lambda: "it" in stats and stats["it"].first_seq.num_completion_tokens > 3, "answered")
    else:
        await until(lambda: "it" in engine._streams, "admitted")
    return task


async def _close(task, stream) -> None:
    task.cancel()
    with contextlib.suppress(BaseException):
        await task
    await stream.aclose()


STAGES = pytest.mark.parametrize(
    "stage", ["queued for preparation", "while it is prepared", "waiting in the engine", "in mid-answer"]
)


@STAGES
@in_a_loop
async def test_cancelling_the_task_frees_all_at_once(engine, stage):
    async with contextlib.AsyncExitStack() as others:
        task = await _at_stage(engine, stage, others)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "it" not in engine._streams
        await until(lambda: "it" not in engine._engine.scheduler.groups, "aborted")


@STAGES
@in_a_loop
async def test_abort_ends_the_stream_with_what_there_is(engine, stage):
    async with contextlib.AsyncExitStack() as others:
        task = await _at_stage(engine, stage, others)
        assert await engine.abort("it")
        assert "it" not in engine._engine.scheduler.groups and "it" not in engine._streams
        deltas = (await task)[0]
        assert deltas[-1].finish_reason == "aborted" and not await engine.abort("it")
        assert [c.finish_reason for c in deltas[-1].output.completions] == ["aborted"]
        assert deltas[-1].output.error is None and deltas[-1].output.arrival_time < deltas[-1].output.finish_time
        if stage == "in mid-answer":
            completion = deltas[-1].output.completions[0]
            assert "".join(delta.text for delta in deltas) == completion.text
            assert len(completion.token_ids) > 3


@contextlib.asynccontextmanager
async def _in_mid_step(engine: AsyncLLM, monkeypatch):
    """The engine is in a step, which lasts until the end of this."""
    real, begun, may_end = engine._engine.step, threading.Event(), threading.Event()

    def step():
        begun.set()
        assert may_end.wait(20)
        return real()

    async with contextlib.aclosing(engine.generate("go on", ENDLESS)) as stream:
        await anext(stream)
        monkeypatch.setattr(engine._engine, "step", step)
        await until(begun.is_set, "in a step")
        try:
            yield
        finally:
            may_end.set()


@in_a_loop
async def test_who_tires_of_waiting_for_an_abort_leaves_it_to_happen(engine, monkeypatch):
    task = asyncio.create_task(answer(engine, QUESTION, ENDLESS, request_id="it"))
    await until(lambda: "it" in engine._engine.scheduler.groups, "in the engine")
    async with _in_mid_step(engine, monkeypatch):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.abort("it"), 0.01)
    assert (await task)[0][-1].finish_reason == "aborted" and "it" not in engine._streams


@in_a_loop
async def test_what_is_aborted_on_its_way_to_the_engine_does_not_arrive(engine, monkeypatch):
    gate = Gate()
    task = asyncio.create_task(answer(engine, QUESTION, ENDLESS, request_id="it", load=gate))
    await until(gate.is_reached.is_set, "prepared")
    async with _in_mid_step(engine, monkeypatch):
        aborting = asyncio.create_task(engine.abort("it"))
        await until(lambda: len(engine._thread._commands) == 1, "asked for the abort")
        gate.is_open.set()
        await until(lambda: len(engine._thread._commands) == 2, "prepared")
    assert await aborting and (await task)[0][-1].finish_reason == "aborted"
    assert "it" not in engine._engine.scheduler.groups


@pytest.mark.parametrize("stage", ["while it is prepared", "waiting in the engine", "in mid-answer"])
@in_a_loop
async def test_the_deadline_holds_at_every_stage(engine, stage):
    gate, blockers = Gate(), []
    if stage == "waiting in the engine":
        blockers = [engine.generate(QUESTION, ENDLESS) for _ in range(4)]
        await asyncio.gather(*(anext(blocker) for blocker in blockers))
    load = gate if stage == "while it is prepared" else load_image
    with pytest.raises(DeadlineExceeded, match=r"not complete after 0\.1 seconds"):
        await answer(engine, QUESTION, ENDLESS, timeout=0.1, load=load)
    gate.is_open.set()
    for blocker in blockers:
        await blocker.aclose()


@in_a_loop
async def test_leaving_the_loop_early_aborts(engine):
    async with contextlib.aclosing(engine.generate(QUESTION, ENDLESS)) as stream:
        async for _ in stream:
            break
    assert not engine._streams


@in_a_loop
async def test_more_than_may_wait_is_refused_and_positions_are_known(make):
    engine = make(max_num_seqs=1, max_waiting=2)
    streams = [engine.generate(QUESTION, ENDLESS, name) for name in ("a", "b", "c")]
    tasks = [asyncio.create_task(anext(streams[0]))]
    await tasks[0]
    for stream, name in zip(streams[1:], "bc", strict=True):
        tasks.append(asyncio.create_task(anext(stream)))
        await until(lambda name=name: name in engine._streams, "admitted")
    assert [engine.position(name) for name in ("a", "b", "c", "d")] == [0, 1, 2, None]
    with pytest.raises(EngineBusy, match="3 requests are being served or wait"):
        await answer(engine, QUESTION, SHORT)
    await streams[0].aclose()
    (deltas, _), *_ = await asyncio.gather(answer(engine, QUESTION, SHORT), engine.abort("b"), engine.abort("c"))
    assert len(deltas[-1].output.token_ids) == 6
    await asyncio.gather(*tasks)


@in_a_loop
async def test_a_position_is_known_while_requests_begin(make):
    engine = make(max_num_seqs=1)

    class Beginning:  # between one look and the next
        looks = 0

        @property
        def has_begun(self) -> bool:
            self.looks += 1
            return self.looks > 1

    engine._streams["it"] = Beginning()
    assert engine.position("it") in (0, 1)
    del engine._streams["it"]


async def fetched() -> dict:
    return QUESTION


@in_a_loop
async def test_a_request_may_still_have_to_be_fetched(engine):
    deltas, _ = await answer(engine, fetched, SHORT)
    assert len(deltas[-1].output.token_ids) == 6

    async def fail():
        raise KeyError("no such host")

    with pytest.raises(KeyError, match="no such host"):
        await answer(engine, fail, SHORT)


@in_a_loop
async def test_nothing_is_fetched_for_a_request_that_has_no_place(make, monkeypatch):
    engine = make()
    monkeypatch.setattr(engine, "admission", intake.AdmissionWindow(0))
    with pytest.raises(EngineBusy):
        await answer(engine, None, SHORT)  # which cannot be called


@in_a_loop
async def test_a_fetch_that_another_cancels_fails_its_request(engine):
    shared = asyncio.create_task(asyncio.sleep(60))
    tasks = [asyncio.create_task(answer(engine, lambda: asyncio.wait_for(shared, None), SHORT)) for _ in range(2)]
    await until(lambda: len(engine._streams) == 2, "admitted")
    shared.cancel()
    for task in tasks:
        with pytest.raises(RequestFailed, match="could not be fetched: CancelledError"):
            await asyncio.wait_for(task, 20)


@pytest.mark.parametrize("own", [{"request_id": "mine"}, {"sampling_params": {"max_tokens": 2}}])
@in_a_loop
async def test_a_fetched_request_comes_too_late_with_settings_of_its_own(engine, own):
    async def fetch():
        return QUESTION | own

    with pytest.raises(ValueError, match=f"brings {next(iter(own))}, which is needed before"):
        await answer(engine, fetch, SHORT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the task that is left behind
@pytest.mark.parametrize("how", ["the next request", "drain"])
def test_a_loop_that_is_closed_while_it_fetches_keeps_no_place(make, how):
    engine = make(max_num_seqs=1, max_waiting=0)
    loop = asyncio.new_event_loop()
    task = loop.create_task(answer(engine, asyncio.Event().wait, SHORT))
    loop.run_until_complete(until(lambda: engine._streams, "admitted"))
    loop.close()
    if how == "drain":
        asyncio.run(asyncio.wait_for(engine.shutdown(timeout=20), 10))
    else:
        deltas, _ = asyncio.run(answer(engine, QUESTION, SHORT))
        assert len(deltas[-1].output.token_ids) == 6
    assert not engine._streams
    del task
    gc.collect()  # here, where its complaints are expected


@pytest.mark.parametrize("how", ["deadline", "abort", "cancel", "shutdown", "drain"])
@in_a_loop
async def test_a_fetch_belongs_to_its_request(make, how):
    engine = make()
    is_here, is_begun, ends = asyncio.Event(), asyncio.Event(), []

    async def fetch():
        is_begun.set()
        try:
            await is_here.wait()
        finally:
            ends.append(how)
        return QUESTION

    timeout = 0.05 if how == "deadline" else None
    task = asyncio.create_task(answer(engine, fetch, SHORT, request_id="it", timeout=timeout))
    await is_begun.wait()
    assert engine.stats().num_preparing == 1 and engine.position("it") == 1
    if how == "deadline":
        with pytest.raises(DeadlineExceeded, match=r"after 0\.05 seconds"):
            await task
    elif how == "abort":
        assert await engine.abort("it")
        assert (await task)[0][-1].finish_reason == "aborted"
    elif how == "cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how == "shutdown":
        await engine.shutdown(drain=False)
        with pytest.raises(EngineStopped):
            await task
    else:
        closing = asyncio.create_task(engine.shutdown())
        await until(lambda: engine.health().status == "draining", "draining")
        is_here.set()
        assert len((await task)[0][-1].output.token_ids) == 6
        await closing
    while not ends:
        await asyncio.sleep(0)
    assert not engine._streams


@in_a_loop
async def test_an_answer_that_ends_early_says_so_at_once(engine, checkpoint, make_llm):
    """Of several answers to one request: each ends by itself."""
    sampling = {"n": 3, "max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 1}
    llm = make_llm(checkpoint)
    whole = llm.generate_multimodal([QUESTION], sampling)[0].completions
    # A token that only one of them has, and early.
    stop = next(token_id for token_id in whole[1].token_ids if token_id not in whole[0].token_ids + whole[2].token_ids)
    params = SamplingParams(**sampling, stop_token_ids=[stop])
    want = llm.generate_multimodal([QUESTION], params)[0]
    lengths = [len(completion.token_ids) for completion in want.completions]
    assert lengths[0] == lengths[2] == 60 > lengths[1]
    deltas, texts = await answer(engine, QUESTION, params)
    assert texts == [completion.text for completion in want.completions]
    assert [delta.index for delta in deltas if delta.finish_reason is not None] == [1, 0, 2]
    assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    after = deltas[next(place for place, delta in enumerate(deltas) if delta.finish_reason is not None) + 1 :]
    assert len(after) > 2 and 1 not in {delta.index for delta in after}
    for index, completion in enumerate(want.completions):
        own = [delta for delta in deltas if delta.index == index]
        assert [*chain(*(delta.token_ids for delta in own))] == completion.token_ids
        assert [*chain(*(delta.logprobs for delta in own))] == deltas[-1].output.completions[index].logprobs


@in_a_loop
async def test_pictures_prepared_ahead_are_bounded_and_all_are_answered(make, monkeypatch):
    monkeypatch.setattr(intake, "MAX_BYTES", 1)
    engine = make(max_num_seqs=2)
    results = await asyncio.gather(*(answer(engine, ask(noise_image(60, 60, i), "?"), SHORT) for i in range(12)))
    assert all(len(deltas[-1].output.token_ids) == 6 for deltas, _ in results)


@in_a_loop
async def test_text_does_not_wait_for_pictures_that_have_no_room(make, monkeypatch):
    monkeypatch.setattr(intake, "MAX_BYTES", 1)
    monkeypatch.setattr(intake, "NUM_WORKERS", 1)  # as many pictures are begun before the first is found too large
    engine = make(max_num_seqs=1)
    running = engine.generate(ask("go on"), ENDLESS)
    await anext(running)
    requests = [QUESTION, ask(noise_image(70, 70), "?"), ask(noise_image(70, 70), "?"), ask("text")]
    tasks = [asyncio.create_task(answer(engine, r, SHORT, request_id=f"r{i}")) for i, r in enumerate(requests)]
    await until(lambda: "r3" in engine._streams and engine._streams["r3"].is_prepared, "prepared")
    assert engine.stats().num_preparing >= 1  # the first picture may be prepared, the others find no room
    tasks[2].cancel()
    await until(lambda: "r2" not in engine._streams, "cancelled")
    assert engine._preparation.num_queued <= 1
    await running.aclose()
    for task in (tasks[0], tasks[1], tasks[3]):
        assert len((await task)[0][-1].output.token_ids) == 6


@in_a_loop
async def test_an_abort_before_the_engine_has_it_ends_every_answer(engine):
    gate = Gate()
    params = SamplingParams(n=3, max_tokens=5)
    task = asyncio.create_task(answer(engine, QUESTION, params, request_id="it", load=gate))
    await until(gate.is_reached.is_set, "prepared")
    await engine.abort("it")
    deltas, texts = await task
    gate.is_open.set()
    assert texts == ["", "", ""] and [delta.finish_reason for delta in deltas] == ["aborted"] * 3


@in_a_loop
async def test_pictures_that_wait_are_no_hits(make):
    engine = make(max_num_seqs=1)
    running = engine.generate(ask(noise_image(60, 60, 9), "go on"), ENDLESS)
    await anext(running)
    tasks = [asyncio.create_task(answer(engine, ask(noise_image(60, 60, i), "?"), SHORT)) for i in range(4)]
    await until(lambda: engine.stats().num_waiting == 4, "waiting")
    assert engine.stats().image_hit_rate == 0.0
    await running.aclose()
    await asyncio.gather(*tasks)
    assert engine.stats().image_hit_rate == 0.0 and engine.stats().num_images == 5


@in_a_loop
async def test_a_failed_step_fails_its_requests_and_the_next_is_well(make, monkeypatch):
    engine = make()
    real, calls = engine._engine.model_runner.run, []

    def fail_once(*args):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("the device said no")
        return real(*args)

    monkeypatch.setattr(engine._engine.model_runner, "run", fail_once)
    with pytest.raises(RequestFailed, match="the device said no"):
        await answer(engine, QUESTION, SHORT)
    assert engine.health().status == "failing" and "said no" in engine.health().reason
    assert engine.health().is_ready
    await answer(engine, QUESTION, SHORT)
    assert engine.health() == async_llm.EngineHealth("ok")


@in_a_loop
async def test_a_broken_engine_fails_all_and_says_why(make, monkeypatch):
    engine = make(max_num_seqs=2)
    gate = Gate()
    tasks = [asyncio.create_task(answer(engine, ask("go on"), ENDLESS)) for _ in range(3)]
    tasks.append(asyncio.create_task(answer(engine, QUESTION, ENDLESS, load=gate)))
    await until(lambda: engine.stats().num_running == 2 and gate.is_reached.is_set(), "under way")

    def broken():
        raise AssertionError("block 3 is held twice")

    monkeypatch.setattr(engine._engine.scheduler, "schedule", broken)
    for task in tasks:
        with pytest.raises(EngineFailed, match="AssertionError: block 3 is held twice"):
            await task
    gate.is_open.set()
    health = engine.health()
    assert health.status == "failed" and "block 3" in health.reason and not health.is_live and not health.is_ready
    with pytest.raises(EngineFailed, match="block 3"):
        await answer(engine, QUESTION, SHORT)
    assert not await engine.abort("request-1") and not engine._streams
    await engine.shutdown()
    assert engine.health().status == "failed"


@in_a_loop
async def test_a_drained_shutdown_finishes_what_is_in_flight(make):
    engine = make(max_num_seqs=2)
    tasks = [asyncio.create_task(answer(engine, ask(f"q{i}"), SamplingParams(max_tokens=50))) for i in range(6)]
    await until(lambda: engine.stats().num_running or engine.stats().num_finished, "running")
    closing = asyncio.create_task(engine.shutdown())
    await until(lambda: engine.health().status != "ok", "draining")
    with pytest.raises(EngineStopped, match="shutting down"):
        await answer(engine, QUESTION, SHORT)
    for deltas, _ in await asyncio.gather(*tasks):
        assert deltas[-1].finish_reason in ("eos", "length")
    await closing
    assert engine.health().status == "stopped"
    await engine.shutdown()  # again


@pytest.mark.parametrize("how", [{"drain": False}, {"drain": True, "timeout": 0.05}], ids=["at once", "impatient"])
@in_a_loop
async def test_a_shutdown_that_does_not_wait_ends_all_with_an_error(make, how):
    engine = make(max_num_seqs=1)
    tasks = [asyncio.create_task(answer(engine, ask("go on"), ENDLESS)) for _ in range(3)]
    await until(lambda: engine.stats().num_running, "running")
    await engine.shutdown(**how)
    for task in tasks:
        with pytest.raises(EngineStopped, match="shut down before the answer was complete"):
            await task
    assert engine.health().status == "stopped" and not engine.health().is_live


@in_a_loop
async def test_a_second_shutdown_cuts_a_patient_one_short(make):
    engine = make()
    task = asyncio.create_task(answer(engine, ask("go on"), ENDLESS))
    await until(lambda: engine.stats().num_running, "running")
    patient = asyncio.create_task(engine.shutdown())
    await until(lambda: engine.health().status == "draining", "draining")
    await engine.shutdown(drain=False)
    await patient
    with pytest.raises(EngineStopped):
        await task


def test_loops_in_several_threads_share_an_engine(engine, checkpoint, make_llm):
    want = make_llm(checkpoint).generate_multimodal([QUESTION], SHORT)[0].text
    texts = []
    threads = [
        threading.Thread(target=lambda: texts.append(asyncio.run(answer(engine, QUESTION, SHORT))[1][0]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == [want] * 4


def test_a_loop_that_is_gone_leaves_nothing_running(engine):
    loop = asyncio.new_event_loop()
    stream = engine.generate(QUESTION, ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.close()  # nobody closes the generator
    wait_until_idle(engine)
    asyncio.run(stream.aclose())


@pytest.mark.parametrize("seed", range(3))
@in_a_loop
async def test_whoever_leaves_in_whatever_way_the_others_get_the_right_answer(engine, checkpoint, make_llm, seed):
    """Random crowds, of whom some hang up, are aborted, run out of time or bring a bad picture."""
    rng = random.Random(seed)
    wanted = make_llm(checkpoint).generate_multimodal([r for r, _ in REQUESTS], [p for _, p in REQUESTS])

    async def visit(number: int) -> bool:
        which, fate = rng.randrange(len(REQUESTS)), rng.choice(["stay", "stay", "leave", "abort", "late", "bad"])
        request, params = REQUESTS[which]
        await asyncio.sleep(rng.random() * 0.5)
        patience, name = rng.random() * 0.2, f"visitor-{number}"
        keys = {"timeout": patience} if fate == "late" else {}
        if fate == "bad":
            request = ask(b"no picture", "?")
        task = asyncio.create_task(answer(engine, request, params, request_id=name, **keys))
        if fate in ("leave", "abort"):
            await asyncio.sleep(patience)
            task.cancel() if fate == "leave" else await engine.abort(name)
        try:
            deltas, texts = await task
        except EngineBusy:
            return False
        except (asyncio.CancelledError, DeadlineExceeded, ValueError):
            assert fate in ("leave", "late", "bad")
            return False
        if deltas[-1].finish_reason == "aborted":
            return False
        assert texts == [completion.text for completion in wanted[which].completions]
        return True

    right = await asyncio.gather(*(visit(number) for number in range(40)))
    assert any(right) and not all(right)


@in_a_loop
async def test_statistics_count_what_was_done(make):
    engine = make()
    assert engine.stats().prefix_hit_rate is None and engine.stats().image_hit_rate is None
    for _ in range(2):
        await answer(engine, QUESTION, SHORT)
    stats = engine.stats()
    assert (stats.num_finished, stats.num_output_tokens) == (2, 12)
    assert (stats.num_images, stats.num_encoded_images, stats.image_hit_rate) == (2, 1, 0.5)
    assert 0 < stats.num_cached_tokens < stats.num_prompt_tokens and 0 < stats.prefix_hit_rate < 1
    assert stats.output_tokens_per_s > 0 and stats.prompt_tokens_per_s > 0
    assert (stats.num_preparing, stats.num_waiting, stats.num_running, stats.kv_usage) == (0, 0, 0, 0.0)
    stream = engine.generate(QUESTION, ENDLESS)
    await anext(stream)
    assert engine.stats().num_running == 1 and 0 < engine.stats().kv_usage <= 1
    await stream.aclose()


def test_a_program_that_forgets_to_shut_down_still_ends(checkpoint):
    code = f"""
import asyncio
from mmvllm import AsyncLLM, SamplingParams
engine = AsyncLLM({str(checkpoint)!r}, num_kvcache_blocks=64, device="cpu")
async def main():
    async for delta in engine.generate("go on", SamplingParams(max_tokens=900, ignore_eos=True)):
        print("begun")
        break
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr
    assert "Traceback" not in done.stderr
