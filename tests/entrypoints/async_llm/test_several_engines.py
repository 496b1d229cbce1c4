"""Several engines behind one AsyncLLM: the same answers, affinity to what an engine cached, and engines that end."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from mmvllm import LLM, AsyncLLM, SamplingParams
from mmvllm.errors import ArgumentError, EngineUnavailable, RequestError, RequestFailed
from tests.helpers.engine.async_engines import LONG, REQUESTS, SHORT, async_test, collect, reached
from tests.helpers.engine.data_parallel import DATA_PARALLEL, kill, only_seven, pids, slowly
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.needs import needs
from tests.helpers.processes import spawned, wait_until_gone


@pytest.fixture(scope="module")
@needs("spawns")
def engines(checkpoint):
    engine = AsyncLLM(checkpoint, **DATA_PARALLEL)
    yield engine
    processes = pids(engine)
    asyncio.run(engine.shutdown(drain=False))
    wait_until_gone(processes)


async def all_up(engine: AsyncLLM) -> None:
    await reached(lambda: [one.status for one in engine.health().engines] == ["ok", "ok"], "up")


def num_begun(engine: AsyncLLM, index: int) -> int:
    """Requests in an engine whose first deltas have arrived."""
    return sum(one.engine == index and one.prompt is None for one in engine._thread._assigned.values())


async def kill_under_load(engine: AsyncLLM, tasks: list[asyncio.Task]) -> None:
    """Kill the first engine at a moment at which both have requests that have begun."""
    processes = [psutil.Process(pid) for pid in pids(engine)]
    while not (num_begun(engine, 0) and num_begun(engine, 1)):
        for process in processes:
            process.resume()
        await asyncio.sleep(0.01)
        for process in processes:
            process.suspend()
        await asyncio.sleep(0.1)  # what they have sent arrives
        assert not all(task.done() for task in tasks), "all requests have ended"
    processes[0].kill()
    processes[1].resume()


def assert_nothing_left(engine: AsyncLLM) -> None:
    stats = engine.stats()
    assert not engine._streams and not engine._thread.num_tracked
    assert (stats.num_preparing, stats.num_waiting, stats.num_running, stats.num_used_blocks) == (0, 0, 0, 0)


@pytest.mark.spawns
@async_test
async def test_several_engines_serve_embeddings(engines, checkpoint, make_llm):
    requests = [ask(noise_image(60, 90, 1), "What?"), "Hello", [5, 6, 7], ask("And?")]
    outputs = await asyncio.gather(*(engines.embed(request, dimensions=9) for request in requests))
    for output, alone in zip(outputs, make_llm(checkpoint).embed(requests, dimensions=9), strict=True):
        np.testing.assert_allclose(output.embedding, alone.embedding, atol=1e-5)
    with pytest.raises(ValueError, match=r"dimensions must be at most.*, got 4000"):
        await engines.embed("Hello", dimensions=4000)
    assert_nothing_left(engines)


@async_test
async def test_logits_processors_that_an_engine_cannot_import_are_refused(engines, monkeypatch):
    def in_main(token_ids, logits):
        return logits

    in_main.__module__, in_main.__qualname__ = "__main__", "in_main"
    monkeypatch.setattr(sys.modules["__main__"], "in_main", in_main, raising=False)
    before = pids(engines)
    for function in (in_main, lambda token_ids, logits: logits):
        with pytest.raises(
            RequestError, match="logits_processors cannot be sent to the process of an engine"
        ) as caught:
            await collect(engines, ask("a"), SamplingParams(logits_processors=[function]))
        assert caught.value.param == "logits_processors"
    deltas, _ = await collect(engines, ask("a"), SamplingParams(max_tokens=3, logits_processors=[only_seven]))
    assert deltas[-1].output.token_ids == [7, 7, 7]
    assert pids(engines) == before
    assert_nothing_left(engines)


@async_test
async def test_streams_of_several_engines_equal_the_offline_completions(engines, checkpoint, make_llm):
    expected = make_llm(checkpoint).generate_multimodal([r for r, _ in REQUESTS], [p for _, p in REQUESTS])
    results = await asyncio.gather(*(collect(engines, *REQUESTS[i % 5]) for i in range(20)))
    for i, (deltas, texts) in enumerate(results):
        want = expected[i % 5].completions
        assert [c.token_ids for c in deltas[-1].output.completions] == [c.token_ids for c in want]
        assert texts == [c.text for c in want] and deltas[-1].output.num_prompt_tokens == deltas[0].num_prompt_tokens
    assert all(stats.num_finished > 0 for stats in engines.engine_stats())
    assert engines.max_num_seqs == 16 and engines.stats().num_blocks == 512
    assert_nothing_left(engines)


@async_test
async def test_a_conversation_goes_to_the_engine_that_has_its_cache(engines):
    conversations = [[*ask(noise_image(90, 90, seed), f"Question {seed}?")["messages"]] for seed in range(6)]
    cached = []
    for turn in range(3):
        for messages in conversations:
            deltas, (text,) = await collect(engines, {"messages": messages}, SamplingParams(max_tokens=20))
            cached.append((turn, deltas[-1].output.num_cached_tokens))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And what else? " * 5}]
    assert all(number == 0 for turn, number in cached if turn == 0)
    assert all(number > 0 for turn, number in cached if turn > 0)
    assert all(stats.num_running == 0 and stats.num_cached_tokens > 0 for stats in engines.engine_stats())


@async_test
async def test_all_engines_forget_their_caches(engines):
    requests = [ask(noise_image(90, 90, seed), f"Question {seed}?", cache_salt=str(seed)) for seed in range(6)]

    async def cached() -> list[int]:
        found = await asyncio.gather(*(collect(engines, request, SamplingParams(max_tokens=2)) for request in requests))
        return [deltas[-1].output.num_cached_tokens for deltas, _ in found]

    await cached()
    assert all(await cached())
    assert engines.reset_prefix_cache()
    assert not any(await cached()) and all(await cached())


@async_test
async def test_requests_on_any_engine_are_aborted(engines):
    params = replace(LONG, logits_processors=[slowly])  # no completion ends before its abort
    streams = [asyncio.create_task(collect(engines, f"Go on {i}", params, request_id=str(i))) for i in range(6)]
    await reached(lambda: engines.stats().num_running == 6, "running")
    assert [engines.position(str(i)) for i in range(6)] == [0] * 6 and engines.position("other") is None
    assert await engines.abort("0") and await engines.abort("1") and not await engines.abort("other")
    for stream in streams[2:]:
        stream.cancel()
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert [deltas[-1].finish_reason for deltas, _ in results[:2]] == ["aborted"] * 2
    assert results[0][0][-1].output.completions[0].text.startswith(results[0][1][0])
    await reached(lambda: engines.stats().num_used_blocks == 0 and not engines._thread.num_tracked, "idle")
    assert_nothing_left(engines)


@pytest.mark.parametrize(
    ("request_", "keys", "message"),
    [
        ("", {}, "at least one token"),
        ([1, 10**9], {}, "token ids of a prompt must be integers in"),
        (["a"], {}, "token ids"),
        (ask("word " * 2000), {}, "maximum context length is"),
        (ask("a", priority="high"), {}, "priority must be int, got 'high'"),
        (ask("a", cache_salt=object), {}, "cache_salt"),
        (ask("a", cache_salt=lambda: None), {}, "cannot be sent|pickle"),
    ],
)
@async_test
async def test_a_request_that_an_engine_refuses_fails_alone(engines, request_, keys, message):
    good = asyncio.create_task(collect(engines, "Good", SHORT))
    with pytest.raises((ValueError, RequestFailed), match=message):
        await collect(engines, request_, SHORT, **keys)
    assert len((await good)[0][-1].output.token_ids) == 6
    assert_nothing_left(engines)


@pytest.mark.slow
@async_test
async def test_an_engine_killed_under_load_loses_nothing_that_had_not_begun(engines, checkpoint, make_llm):
    await all_up(engines)
    params, prompts = SamplingParams(max_tokens=200, ignore_eos=True), [f"Prompt {i}" for i in range(40)]
    expected = [output.text for output in make_llm(checkpoint).generate(prompts, params)]
    begun: set[int] = set()

    async def answer(i: int) -> str:
        text = ""
        async for delta in engines.generate(prompts[i], params):
            begun.add(i)
            text += delta.text
        return text

    before, finished = pids(engines), engines.stats().num_finished
    tasks = [asyncio.create_task(answer(i)) for i in range(len(prompts))]
    await kill_under_load(engines, tasks)
    with_token = {*begun}
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    failed = {i for i, one in enumerate(answers) if isinstance(one, Exception)}
    assert failed and failed <= begun and all(isinstance(answers[i], RequestFailed) for i in failed)
    assert all("was ended by SIGKILL" in str(answers[i]) for i in failed)
    assert all(answers[i] == expected[i] for i in range(len(prompts)) if i not in failed)
    assert with_token - failed  # the other engine went on
    assert engines.stats().num_finished == finished + len(prompts) - len(failed)
    assert engines.health().status == "ok" and engines.health().is_ready
    await all_up(engines)
    assert pids(engines)[0] != before[0] and pids(engines)[1] == before[1]
    again = await asyncio.gather(*map(answer, range(len(prompts))))
    assert again == expected
    assert_nothing_left(engines)


@pytest.mark.slow
@async_test
async def test_while_no_engine_is_up_requests_are_refused_and_those_admitted_wait(engines):
    await all_up(engines)
    may_load = asyncio.Event()

    async def request() -> str:
        await may_load.wait()
        return "Hello"

    waiting = asyncio.create_task(collect(engines, request, SHORT))
    await reached(lambda: engines.stats().num_preparing == 1, "admitted")
    kill(engines, 0)
    kill(engines, 1)
    await reached(lambda: not engines._thread.is_up, "down")
    health = engines.health()
    assert (health.status, health.is_live, health.is_ready) == ("starting", True, False)
    assert [one.reason for one in health.engines] == ["its process was ended by SIGKILL"] * 2
    with pytest.raises(EngineUnavailable, match="no engine is up"):
        await collect(engines, "Hello", SHORT)
    may_load.set()
    deltas, (text,) = await waiting
    assert len(deltas[-1].output.token_ids) == 6 and text
    await all_up(engines)


@pytest.mark.slow
@async_test
async def test_an_engine_that_does_not_answer_is_killed_and_started_again(checkpoint):
    engine = AsyncLLM(checkpoint, **DATA_PARALLEL, step_timeout=5)
    try:
        before = pids(engine)
        os.kill(before[0], signal.SIGSTOP)
        reason = "its process did not answer for 5 s and was killed"
        await reached(lambda: engine.health().engines[0].reason == reason, "noticed")
        assert engine.health().is_ready
        deltas, _ = await collect(engine, "Hello", SHORT)
        assert deltas[-1].output.token_ids
        await all_up(engine)
        assert pids(engine)[0] != before[0] and pids(engine)[1] == before[1]
    finally:
        await engine.shutdown(drain=False)


@pytest.mark.spawns
@async_test
async def test_a_refused_config_is_the_error_of_an_engine(checkpoint):
    before = spawned(recursive=True)
    with pytest.raises(ValueError, match="max_model_len is 900, but the KV cache holds 256 tokens"):
        AsyncLLM(checkpoint, **DATA_PARALLEL | {"num_kvcache_blocks": 16, "max_model_len": 900})
    assert {*spawned(recursive=True)} <= {*before}


def test_too_few_devices_are_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ArgumentError) as refused:
        AsyncLLM(checkpoint, **DATA_PARALLEL | {"device": "cuda", "tensor_parallel_size": 2})
    message = "data_parallel_size 2 with tensor_parallel_size 2 needs 4 CUDA devices; there are 3 to use"
    assert str(refused.value) == message


def test_llm_names_what_has_several_engines(checkpoint):
    with pytest.raises(ValueError, match="LLM has one engine; AsyncLLM may have several, and mmvllm serve, demo and"):
        LLM(checkpoint, data_parallel_size=2)
    for wrong in (0, True, "2"):
        with pytest.raises(ValueError, match=r"data_parallel_size must be .*, got"):
            AsyncLLM(checkpoint, **DATA_PARALLEL | {"data_parallel_size": wrong})
    with LLM(checkpoint, data_parallel_size=1, skip_warmup=True, num_kvcache_blocks=64, device="cpu") as llm:
        assert llm.device.type == "cpu"


SCRIPT = """
import os, signal, sys
from mmvllm import AsyncLLM
engine = AsyncLLM(device="cpu", data_parallel_size=2, num_kvcache_blocks=64, skip_warmup=True)
print(*engine._engine.pids, flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "raise":
    raise KeyError("a mistake")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 1), ("kill", -9)])
def test_no_process_outlives_its_program(how, code):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.returncode == code and len(done.stdout.split()) == 2, done.stderr
    wait_until_gone([int(pid) for pid in done.stdout.split()])
    assert "leaked" not in done.stderr
