"""Ranks in processes: the same tokens; whatever ends one or all of them, requests get the reason, and nothing is left.

The steps themselves are tested with ranks in threads (tests/worker/test_tensor_parallel.py).
"""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import aclosing, suppress
from pathlib import Path

import psutil
import pytest

from mmvllm import LLM, AsyncLLM, SamplingParams
from mmvllm.errors import EngineFailed
from mmvllm.processes.ranks import ConnectedRanks
from mmvllm.worker import multiprocess_group
from tests.helpers.engine.async_engines import wait_until
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.processes import spawned

pytestmark = [pytest.mark.network, pytest.mark.spawns]

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 64, "skip_warmup": True}
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
REQUEST = ask(noise_image(91, 64, 1), "Describe this image.")
KILLED = "the engine failed: RanksFailed: the process of rank 1 was ended by SIGKILL"
LIMIT_SECONDS = 5  # from the end of a process to the end of all requests


def group_of(group: int) -> list[psutil.Process]:
    """Processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def names_of_shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


@pytest.fixture
def make(checkpoint):
    """LLM(...) with two ranks, and the process of rank 1."""
    made = []

    def make(**engine_args) -> tuple[LLM, psutil.Process]:
        before = spawned()
        made.append(LLM(checkpoint, **ARGUMENTS | {"tensor_parallel_size": 2} | engine_args))
        (process,) = [process for process in spawned() if process not in before]
        return made[-1], process

    yield make
    for llm in made:
        llm.exit()


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == "LISTEN"}


def test_two_processes_answer_as_one_does_and_leave_nothing(checkpoint, make):
    shared_memory, listening = names_of_shared_memory(), listening_ports()
    one = LLM(checkpoint, **ARGUMENTS)
    requests = [REQUEST, ask("Count the shapes."), ask(noise_image(60, 133, 2), "and", noise_image(91, 64, 1), "?")]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [output.token_ids for output in one.generate_multimodal(requests, params)]
    one.exit()
    two, process = make()
    assert [output.token_ids for output in two.generate_multimodal(requests, params)] == expected
    two.exit()
    two.exit()
    assert not process.is_running()
    assert not listening_ports() - listening
    assert not names_of_shared_memory() - shared_memory


@pytest.mark.slow
def test_three_processes(checkpoints, make):
    one = LLM(checkpoints("deepstack3-vit80-untied"), **ARGUMENTS)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [output.token_ids for output in one.generate_multimodal([REQUEST], params)]
    one.exit()
    three = LLM(checkpoints("deepstack3-vit80-untied"), **ARGUMENTS, tensor_parallel_size=3)
    assert [output.token_ids for output in three.generate_multimodal([REQUEST], params)] == expected
    three.exit()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("num_steps", [0, 1, 5], ids=["prefill", "first token", "decode"])
def test_a_killed_process_ends_all_requests_with_the_reason(num_steps, make):
    """The process is stopped first, so that the step waits for it in an operation, and then killed."""
    llm, process = make()
    prompt = llm.processor(REQUEST)
    groups = [llm.engine.add(prompt, LONG), llm.engine.add(prompt, LONG)]
    for _ in range(num_steps):
        llm.engine.step()
    process.suspend()
    killed = []
    timer = threading.Timer(0.5, lambda: (killed.append(time.monotonic()), process.kill()))
    timer.start()
    with pytest.raises(EngineFailed, match=KILLED):
        llm.engine.step()
    assert time.monotonic() - killed[0] < LIMIT_SECONDS
    assert all(group.output.error == KILLED for group in groups)
    with pytest.raises(EngineFailed, match=KILLED):
        llm.generate_multimodal([REQUEST], LONG)


def test_a_process_that_is_killed_while_idle_is_noticed(checkpoint, make):
    shared_memory = names_of_shared_memory()
    llm, process = make()
    process.kill()
    wait_until(lambda: llm.engine.model_runner.worker_group.failure, "noticed")
    with pytest.raises(EngineFailed, match=KILLED):
        llm.generate_multimodal([REQUEST], LONG)
    llm.exit()
    assert not names_of_shared_memory() - shared_memory


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "in a step"])
def test_a_process_that_does_not_answer_is_killed(is_idle, make):
    llm, process = make(step_timeout=5)
    reason = "the process of rank 1 did not answer for 5 s and was killed"
    llm.generate(["Count"], SamplingParams(max_tokens=2), use_tqdm=False)
    process.suspend()
    if is_idle:
        wait_until(lambda: llm.engine.model_runner.worker_group.failure == reason, "noticed")
    with pytest.raises(EngineFailed, match=f"the engine failed: RanksFailed: {reason}"):
        llm.generate_multimodal([REQUEST], LONG)
    process.wait(LIMIT_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_processes_that_share_a_model_are_started_again(how, checkpoint, caplog):
    engine = AsyncLLM(checkpoint, **ARGUMENTS, tensor_parallel_size=2, step_timeout=5)
    try:
        first = spawned(recursive=True)
        rank = next(process for process in first if process.pid not in engine._engine.pids)
        expected = asyncio.run(answer(engine))
        rank.kill() if how == "killed" else rank.suspend()
        wait_until(lambda: not engine.health().is_ready, "noticed")
        assert engine.health().is_live and "the process of rank 1" in engine.health().reason
        wait_until(lambda: engine.health().is_ready, "started again", seconds=240)
        assert asyncio.run(answer(engine)) == expected
        assert not psutil.wait_procs(first, timeout=10)[1]
        assert any(
            "engine 0 has ended and is started again: RanksFailed: the process of rank 1" in r.message
            for r in caplog.records
        )
    finally:
        engine._close(drain=False)


async def answer(engine: AsyncLLM) -> list[int]:
    async with aclosing(engine.generate(REQUEST, SamplingParams(max_tokens=6, ignore_eos=True))) as deltas:
        return [token async for delta in deltas for token in delta.token_ids]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.7, 1.5, 2.2])
def test_a_process_that_is_killed_while_it_starts(seconds, checkpoint, monkeypatch):
    real = multiprocess_group._start_process
    started = []

    def start(*arguments):
        started.append(real(*arguments))
        threading.Timer(seconds, started[0].kill).start()
        return started[0]

    monkeypatch.setattr(multiprocess_group, "_start_process", start)
    begin = time.monotonic()
    try:
        LLM(checkpoint, **ARGUMENTS, tensor_parallel_size=2).exit()  # it may have been faster
    except RuntimeError as error:
        assert "the process of rank 1 was ended by SIGKILL" in str(error)
    assert time.monotonic() - begin < seconds + LIMIT_SECONDS + 10 and not started[0].is_alive()
    gc.collect()
    assert not [each for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"]


def test_an_error_of_another_rank_while_it_loads_is_the_reason(checkpoint, monkeypatch):
    real = multiprocess_group._start_process

    def start(pipe, buffers, pulse, loaded, *arguments):
        missing = multiprocess_group.replace(loaded, folder=Path("/no/such/folder"))
        return real(pipe, buffers, pulse, missing, *arguments)

    monkeypatch.setattr(multiprocess_group, "_start_process", start)
    with pytest.raises(RuntimeError, match=r"rank 1: .*/no/such/folder"):
        LLM(checkpoint, **ARGUMENTS, tensor_parallel_size=2)


SCRIPT = """
import os, signal, sys, threading, time
from mmvllm import LLM, SamplingParams
from mmvllm.engine.llm_engine import LLMEngine

def tell():
    print("ready", flush=True)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell runs in the background
    how = sys.argv[2]
    if how == "an exception while it starts":
        LLMEngine.warmup_model = lambda self: (tell(), 1 / 0)
    llm = LLM(sys.argv[1], dtype="float32", device="cpu", num_kvcache_blocks=64, tensor_parallel_size=2,
              skip_warmup=how != "an exception while it starts")
    if how == "while it generates":
        threading.Timer(0.5, tell).start()
        for _ in range(1000):
            llm.generate(["Count"], SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
    llm.generate(["Count"], SamplingParams(max_tokens=3), use_tqdm=False)
    tell()
    if how == "idle":
        time.sleep(60)
    if how == "deleted":
        del llm
        import gc
        gc.collect()
        time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("interpreter exit", None),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("an exception while it starts", None),
                ("idle", signal.SIGTERM),
                ("idle", signal.SIGINT),
                ("idle", signal.SIGKILL),
                ("while it generates", signal.SIGTERM),
                ("while it generates", signal.SIGINT),
                ("while it generates", signal.SIGKILL),
                ("deleted", signal.SIGTERM),
            ]
        ],
    ],
)
def test_no_process_stays_after_any_end(how, number, checkpoint):
    """SIGINT is sent to the whole group, as a terminal does."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), how]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        workers = spawned(process.pid, recursive=True)
        if how == "deleted":
            psutil.wait_procs(workers, timeout=10)
            assert not spawned(process.pid, recursive=True)
        elif number is not None:
            assert len(workers) == 1
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        elif number is not None:
            process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        assert not psutil.wait_procs(workers, timeout=10)[1]
        assert "leaked" not in errors
        if how == "interpreter exit":
            assert process.returncode == 0 and "Traceback" not in errors
        wait_until(lambda: not group_of(process.pid), "empty")
    finally:
        for left in group_of(process.pid):
            left.kill()


def test_the_exit_waits_for_the_thread_that_aborts_the_ranks(make, monkeypatch):
    """A thread that is in C++ at the end of the interpreter ends the program with std::terminate."""
    llm, process = make()
    abort, has_begun, has_ended = ConnectedRanks.abort, threading.Event(), threading.Event()

    def slow_abort(self):
        has_begun.set()
        time.sleep(0.2)
        abort(self)
        has_ended.set()

    monkeypatch.setattr(ConnectedRanks, "abort", slow_abort)
    process.kill()
    assert has_begun.wait(10)
    llm.exit()
    assert has_ended.is_set()


KILLING_SCRIPT = """
import sys

import psutil

from mmvllm import LLM

llm = LLM(sys.argv[1], dtype="float32", device="cpu", num_kvcache_blocks=2, tensor_parallel_size=2, skip_warmup=True)
(rank,) = [process for process in psutil.Process().children() if "spawn_main" in str(process.cmdline())]
rank.kill()
rank.wait()
"""


@pytest.mark.slow
def test_ranks_repeat_no_warning_and_leave_no_semaphore_when_killed(checkpoint):
    """Python warns at its end of semaphores that a process has created and not given up."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLING_SCRIPT, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0 and "leaked" not in done.stderr, done.stderr
    assert done.stderr.count("max_model_len is 32") == 1
