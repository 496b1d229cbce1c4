"""A fork of a process has none of the threads of its engines: every call there says so, and none waits."""

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable

import pytest

from mmvllm import LLM, AsyncLLM, SamplingParams
from tests.helpers.engine.requests import ask
from tests.helpers.serving.server import ENGINE

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
ONE = SamplingParams(max_tokens=1)


def in_a_fork(call: Callable[[], object]) -> str:
    """What a call raises, or returns, in a fork of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # which ends it
        try:
            said = repr(call())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, pickle.dumps(said))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(data) if data else "no end"


CALLS = {
    "generate": lambda llm: llm.generate("a", ONE),
    "generate_multimodal": lambda llm: llm.generate_multimodal([ask("a")], ONE),
    "chat": lambda llm: llm.chat(ask("a")["messages"], ONE),
    "stream_multimodal": lambda llm: list(llm.stream_multimodal([ask("a")], ONE)),
    "embed": lambda llm: llm.embed("a"),
    "score": lambda llm: llm.score(["a"], [["b"]]),
    "add_request": lambda llm: llm.add_request(ask("a")),
    "step": lambda llm: llm.step(),
    "abort_request": lambda llm: llm.abort_request("x"),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "sleep": lambda llm: llm.sleep(),
    "wake_up": lambda llm: llm.wake_up(),
}


@pytest.fixture(scope="module")
def used_llm():
    with LLM(**ENGINE) as llm:
        llm.generate("a", ONE, use_tqdm=False)
        yield llm


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_of_a_fork_is_refused(call, used_llm):
    said = in_a_fork(lambda: call(used_llm))
    assert said.startswith(f"RuntimeError: this model was loaded in process {os.getpid()}, and process ")
    assert said.endswith("load it after the fork, or start processes with 'spawn'")


def test_a_fork_frees_nothing_and_may_load_a_model_of_its_own(used_llm):
    assert in_a_fork(used_llm.exit) == "None"
    assert used_llm.generate("a", ONE, use_tqdm=False)[0].error is None


ASYNC_CALLS = {
    "generate": lambda engine: anext(engine.generate(ask("a"), ONE)),
    "tokenize": lambda engine: engine.tokenize("a"),
    "embed": lambda engine: engine.embed("a"),
    "abort": lambda engine: engine.abort("x"),
}


@pytest.fixture(scope="module")
def used_engine():
    engine = AsyncLLM(**ENGINE)
    asyncio.run(engine.tokenize("a"))
    yield engine
    asyncio.run(engine.shutdown(drain=False))


async def awaited(call, engine):
    return await call(engine)


@pytest.mark.parametrize("call", ASYNC_CALLS.values(), ids=ASYNC_CALLS)
def test_an_async_call_of_a_fork_is_refused(call, used_engine):
    said = in_a_fork(lambda: asyncio.run(awaited(call, used_engine)))
    assert said.startswith(f"RuntimeError: this model was loaded in process {os.getpid()}")


def test_an_engine_of_another_process_is_not_shut_down_by_a_fork(used_engine):
    assert in_a_fork(lambda: asyncio.run(used_engine.shutdown())) == "None"
    assert in_a_fork(used_engine.reset_prefix_cache).startswith("RuntimeError")
    assert asyncio.run(used_engine.tokenize("a"))


def test_engines_in_processes_need_a_process_that_is_no_daemon(tmp_path):
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_start_two, args=(str(tmp_path / "said"), str(tmp_path / "log")), daemon=True)
    process.start()
    process.join(120)
    assert "from a daemonic process of multiprocessing" in (tmp_path / "said").read_text()
    assert (tmp_path / "log").read_text() == ""


def _start_two(path: str, log: str) -> None:
    logging.basicConfig(filename=log)
    try:
        AsyncLLM(data_parallel_size=2, **ENGINE)
    except RuntimeError as error:
        with open(path, "w") as file:
            file.write(str(error))
    sys.exit(0)
