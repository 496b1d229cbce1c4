"""`mmvllm serve --executor ray`: replicas on Ray Serve answer as one engine does, also when one of them is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace

import httpx
import openai
import psutil
import pytest

from mmvllm.cli import serve_ray
from mmvllm.cli.common import option_name
from mmvllm.cli.main import main
from mmvllm.errors import ArgumentError
from mmvllm.server.ray.options import RayServeOptions
from mmvllm.server.settings import ServerSettings
from tests.helpers.serving.server import CHAT, COMPLETIONS, ENGINE, chat, completion, data_uri, image_part, wait_for

pytestmark = pytest.mark.ray

pytest.importorskip("ray.serve")
ray_replica = import_module("mmvllm.server.ray.replica")
ray_serve = import_module("mmvllm.server.ray.deployment")

COMMAND = [sys.executable, "-m", "mmvllm", "serve", "--executor", "ray", "--port", "0", "--drain-timeout", "60"]
COMMAND += ["--device", "cpu", "--dtype", "float32", "--num-kvcache-blocks", "512", "--skip-warmup"]
LONG = chat("Describe this image.", max_tokens=1900, extra_body={"ignore_eos": True})  # some seconds
SCENE = chat(image_part(data_uri()), "How many stars are there?", max_tokens=8)


@dataclass(frozen=True)
class Deployment:
    """A deployment that a command has made: its URL and the command's process."""

    url: str
    process: subprocess.Popen

    def replicas(self) -> set[int]:
        """The process ids of the replicas."""
        return {child.pid for child in self.processes() if "ServeReplica" in name_of(child)}

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def answers(self, number: int) -> list[str]:
        """The contents of the responses to this number of equal requests, sent four at a time."""

        def answer(_: int) -> str:
            response = httpx.post(self.url + CHAT, json=SCENE, timeout=60)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(answer, range(number)))

    def metric(self, name: str) -> float:
        """A metric of one of the replicas."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def name_of(process: psutil.Process) -> str:
    try:
        return process.name() if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:  # the process has ended
        return ""


@contextmanager
def deployed(*arguments: str) -> Iterator[Deployment]:
    """A deployment whose processes are ended afterwards, in whatever way the test ends."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="ray", ignore_cleanup_errors=True) as folder,  # for short paths
        tempfile.TemporaryFile("w+") as err,
        subprocess.Popen(
            [*COMMAND, *arguments],
            env=os.environ | {"RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        ) as process,
    ):
        try:
            told = process.stdout.readline()
            err.seek(0)
            assert told.startswith("bundled is served at http://127.0.0.1:"), err.read()
            yield Deployment(told.split()[-1].removesuffix("/v1"), process)
        finally:
            for child in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
                child.kill()
            process.kill()


@contextmanager
def stream(deployment: Deployment) -> Iterator[openai.Stream]:
    """A long completion of which the first token has arrived; closed at the end."""
    client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=60)
    with client, client.chat.completions.create(**LONG, stream=True) as chunks:
        next(iter(chunks))
        yield chunks


@pytest.mark.slow
def test_a_killed_replica_is_replaced_while_the_other_answers():
    with deployed("--num-replicas", "2") as deployment:
        before = deployment.replicas()
        assert len(before) == 2
        expected = deployment.answers(1)[0]
        assert deployment.answers(16) == [expected] * 16
        os.kill(min(before), signal.SIGKILL)
        wait_for(lambda: min(before) not in deployment.replicas())
        assert deployment.answers(16) == [expected] * 16
        wait_for(lambda: len(deployment.replicas()) == 2, seconds=60)
        assert deployment.replicas() > before - {min(before)}
        assert deployment.answers(16) == [expected] * 16


@pytest.mark.slow
def test_clients_that_disconnect_are_aborted_and_others_are_finished_after_a_signal():
    with deployed("--session-affinity") as deployment:
        with stream(deployment):
            assert deployment.metric("mmvllm_sequences_running") == 1
        wait_for(lambda: deployment.metric("mmvllm_sequences_running") == 0)
        assert deployment.metric("mmvllm_requests_finished_total") == 0
        error = httpx.post(deployment.url + COMPLETIONS, json=completion(max_tokens=0), timeout=60)
        assert error.status_code == 400 and error.json()["error"]["param"] == "max_tokens"
        family = deployment.processes()
        with stream(deployment) as chunks:
            deployment.process.send_signal(signal.SIGTERM)
            *_, last = chunks
            assert last.choices[0].finish_reason == "length"
        assert deployment.process.wait(60) == 0
        wait_for(lambda: not any(map(name_of, family)))


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_reported_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path)[:40])
    done = subprocess.run([*COMMAND, "--max-model-len", "4096"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    reason = "ValueError: max_model_len is 4096; the checkpoint supports at most 2048"
    assert done.stderr.splitlines()[-1] == f"mmvllm serve: the replicas cannot start: {reason}"


def spec(**engine_args) -> "ray_replica.ReplicaSpec":
    settings = ServerSettings(model_names=("bundled",))
    where = {"num_threads": 1, "folder": os.getcwd()}
    return ray_replica.ReplicaSpec(
        model=None, engine_args=ENGINE | engine_args, max_waiting=10, settings=settings, **where
    )


def test_a_replica_is_healthy_until_its_engine_has_failed():
    app = spec().build()
    engine, replica = app.state.engine, SimpleNamespace(app=app)
    check = ray_replica.replica_class(spec()).check_health
    asyncio.run(check(replica))
    engine._fail(RuntimeError("the device is lost"))
    with pytest.raises(RuntimeError, match=r"the engine has failed: .*the device is lost"):
        asyncio.run(check(replica))
    asyncio.run(engine.shutdown(drain=False))


@pytest.mark.parametrize(
    ("options", "engine_args", "replicas", "most"),
    [
        ({}, {"max_num_seqs": 8}, {"num_replicas": 1}, 8),
        (
            {"max_replicas": 4},
            {"max_num_seqs": 8},
            {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8}},
            8,
        ),
        ({"min_replicas": 2, "max_replicas": 2}, {"max_num_seqs": None}, {"num_replicas": 2}, 256),
    ],
)
def test_the_engine_refuses_requests_before_ray_queues_them(options, engine_args, replicas, most):
    numbers = ray_serve._numbers(spec(**engine_args), RayServeOptions(**options))
    assert numbers == replicas | {"max_ongoing_requests": most + 10 + ray_serve.MAX_OTHER_REQUESTS}


def test_session_affinity_needs_a_version_of_ray_that_has_it(monkeypatch):
    monkeypatch.setattr(ray_serve, "find_spec", lambda _: None)
    with pytest.raises(ArgumentError) as raised:
        ray_serve._routing(RayServeOptions(session_affinity=True))
    assert raised.value.format(option_name).startswith("--session-affinity needs the router ray.serve.")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-replicas 2 --max-replicas 3", "give --num-replicas, or --min-replicas and --max-replicas"),
        ("--min-replicas 2", "--min-replicas needs --max-replicas"),
        ("--min-replicas 3 --max-replicas 2", "--min-replicas is 3, above --max-replicas, 2"),
        ("--demo", "--demo needs --executor local: the page keeps its conversations in one process"),
        ("--address auto --port 0", "--port 0 chooses a port of this machine"),
        ("--model nosuch", "model 'nosuch' is neither a local folder nor a hub id"),
    ],
)
def test_wrong_options_are_refused_before_ray_is_started(line, message, capsys, monkeypatch):
    monkeypatch.setattr(ray_serve.ray_session, "start", forbidden("Ray was started"))
    assert main(["serve", "--executor", "ray", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_missing_packages_are_reported_with_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(serve_ray, "find_spec", lambda name: None if name == "grpc" else name)
    assert main(["serve", "--executor", "ray"]) == 2
    assert capsys.readouterr().err == 'mmvllm serve: --executor ray needs grpc; pip install "mmvllm[serve,ray]"\n'


def forbidden(what: str) -> Callable[..., None]:
    def fail(*_, **__) -> None:
        raise AssertionError(what)

    return fail
