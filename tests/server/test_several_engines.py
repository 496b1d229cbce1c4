"""A server with several engines: metrics and health by engine, drain, and the processes of the command."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest

from mmvllm.entrypoints.async_llm import AsyncLLM
from tests.helpers.engine.data_parallel import kill, pids
from tests.helpers.needs import needs
from tests.helpers.processes import wait_until_gone
from tests.helpers.serving.server import (
    CHAT,
    ENGINE,
    LONG,
    Running,
    call,
    chat,
    data_uri,
    image_part,
    make_app,
    metric_samples,
    post,
    receive_all,
    serving,
    wait_for,
)

SEVERAL = ENGINE | {"data_parallel_size": 2}


@pytest.fixture(scope="module")
@needs("network")
def running() -> Iterator[Running]:
    engine = AsyncLLM(**SEVERAL)
    processes = pids(engine)
    with serving(engine) as running:
        yield running
    wait_until_gone(processes)


@pytest.mark.spawns
def test_metrics_of_engines_are_labelled_and_add_up(running):
    app = make_app(running.engine)
    bodies = [chat(image_part(data_uri()), f"Question {i}", max_tokens=3, ignore_eos=True) for i in range(6)]
    assert all(call(app, "POST", CHAT, json=body).is_success for body in bodies)
    found = metric_samples(app)
    by_engine = {key: value for key, value in found.items() if any(label[0] == "engine" for label in key[1:])}
    assert sum(value for key, value in by_engine.items() if key[0] == "mmvllm_output_tokens_total") == 18
    assert sum(value for key, value in by_engine.items() if key[0] == "mmvllm_requests_finished_total") == 6
    assert {key[1] for key in by_engine} == {("engine", "0"), ("engine", "1")}
    assert found["mmvllm_engine_up", ("engine", "1")] == 1 and found["mmvllm_ready",] == 1
    assert found["mmvllm_requests_preparing",] == 0
    assert not any(key[0].startswith(("mmvllm_answers", "mmvllm_http", "mmvllm_first")) for key in by_engine)


def test_health_lists_the_engines_and_is_ok_while_one_serves(running):
    ok = {"status": "ok", "reason": None}
    engines = [{"engine": str(i)} | ok for i in range(2)]
    assert running.get("/health").json() == ok | {"engines": engines}
    kill(running.engine, 1)
    wait_for(lambda: running.get("/health").json()["engines"][1]["status"] == "starting")
    health = running.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert health.json()["engines"][1]["reason"] == "its process was ended by SIGKILL"
    assert metric_samples(make_app(running.engine))["mmvllm_engine_up", ("engine", "1")] == 0
    assert running.client().chat.completions.create(**chat("Hello", max_tokens=2)).choices[0].finish_reason


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_signal_drains_the_engines_and_ends_all_processes(number):
    command = [sys.executable, "-m", "mmvllm", "serve", "--port", "0", "--data-parallel-size", "2", "--device", "cpu"]
    command += ["--num-kvcache-blocks", "512", "--skip-warmup", "--dtype", "float32"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://\S+?:\d+", server.stdout.readline())[0]
        processes = [child.pid for child in psutil.Process(server.pid).children(recursive=True)]
        body = LONG | {"stream": True, "max_tokens": 300}
        with httpx.stream("POST", url + CHAT, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(server.pid, number)
            if number == signal.SIGTERM:
                assert "data: [DONE]" in [*lines]
        assert server.wait(60) == (0 if number == signal.SIGTERM else -9)
        wait_until_gone(processes)
        assert "leaked" not in server.stderr.read()
    finally:
        server.kill()


@pytest.mark.slow
def test_requests_in_flight_on_every_engine_are_finished_before_shutdown(running):
    """The last test of the server: it is shut down."""
    wait_for(lambda: running.engine.health().engines[1].status == "ok")
    connections = [running.connect() for _ in range(12)]  # more than affinity gives to one engine
    for i, connection in enumerate(connections):
        connection.sendall(post(CHAT, chat(f"Hello {i}", max_tokens=200, ignore_eos=True)))
    wait_for(lambda: all(stats.num_running for stats in running.engine.engine_stats()))
    running.server.handle_exit(signal.SIGTERM, None)
    for connection in connections:
        with connection:
            answer = receive_all(connection)
            assert b"HTTP/1.1 200" in answer and b'"finish_reason":"length"' in answer
    running.thread.join(30)
    assert not running.thread.is_alive() and running.engine.health().status == "stopped"
    wait_until_gone(pids(running.engine))
