"""Start-up, graceful shutdown, and the command line of `mmvllm serve`."""

import argparse
import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import openai
import pytest

from mmvllm.cli import serve
from mmvllm.cli.main import main
from mmvllm.cli.ports import listen
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.server.settings import ServerSettings
from tests.helpers.needs import needs
from tests.helpers.serving.server import (
    CHAT,
    LONG,
    SCENES,
    chat,
    image_part,
    post,
    receive_all,
    receive_until,
    serving,
    wait_for,
)


@pytest.fixture
@needs("network")
def own_engine(make_engine) -> AsyncLLM:
    return make_engine()


def stop(running) -> None:
    running.server.handle_exit(signal.SIGTERM, None)


@pytest.mark.spawns
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_requests_in_flight_are_finished_before_shutdown(own_engine, streams):
    body = chat("Hello", max_tokens=100, ignore_eos=True, stream=streams)
    with serving(own_engine) as running, running.connect() as connection:
        connection.sendall(post(CHAT, body))
        wait_for(lambda: own_engine.stats().num_running or own_engine.stats().num_finished)
        stop(running)
        answer = receive_all(connection)
        assert b"HTTP/1.1 200" in answer and b'"finish_reason":"length"' in answer
        assert (b"data: [DONE]" in answer) == streams
        running.thread.join(20)
        assert not running.thread.is_alive()
        with pytest.raises(ConnectionRefusedError):
            running.connect()
    assert own_engine.health().status == "stopped"


@pytest.mark.spawns
def test_connections_that_cannot_be_accepted_are_reported_once(own_engine, caplog, monkeypatch):
    """The event loop tries each of them again and again."""

    def logged() -> list[str]:
        """The loggers of what is logged about it."""
        return [record.name for record in caplog.records if "open files" in f"{record.message} {record.exc_text}"]

    def open_file() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with serving(own_engine) as running:
        accept, is_full = socket.socket.accept, True

        def accept_if_room(listener):
            return open_file() if is_full else accept(listener)

        monkeypatch.setattr(socket.socket, "accept", accept_if_room)
        with running.connect() as waiting:
            waiting.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            wait_for(logged)
            is_full = False
            assert receive_all(waiting).startswith(b"HTTP/1.1 200")
        running.server._loop.call_soon_threadsafe(open_file)
        wait_for(lambda: len(logged()) > 1)
    assert logged() == ["mmvllm.server.run", "asyncio"]
    assert "cannot be accepted (Too many open files)" in caplog.text


@pytest.mark.spawns
def test_requests_that_fetch_images_are_in_flight(own_engine, monkeypatch):
    is_fetched = threading.Event()

    async def fetch(*_) -> bytes:
        await asyncio.to_thread(is_fetched.wait, 20)
        return SCENES[0].read_bytes()

    monkeypatch.setattr("mmvllm.server.common.media.fetch", fetch)
    with serving(own_engine) as running, running.connect() as connection:
        connection.sendall(post(CHAT, chat(image_part("https://example.org/a.png"), max_tokens=2)))
        wait_for(lambda: own_engine.stats().num_preparing == 1)
        stop(running)
        wait_for(lambda: own_engine.health().status == "draining")
        is_fetched.set()
        assert b"HTTP/1.1 200" in receive_all(connection)


@pytest.mark.spawns
def test_after_the_drain_timeout_clients_raise_an_error(own_engine):
    body = {name: value for name, value in LONG.items() if name != "ignore_eos"}
    with serving(own_engine, drain_seconds=0.2) as running, running.client() as client:
        stream = client.chat.completions.create(**body, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        stop(running)
        with pytest.raises(openai.APIError, match="shut down before the completion was finished") as ended:
            list(stream)
        assert ended.value.code == "engine_unavailable"
    assert own_engine.health().status == "stopped"


@pytest.mark.spawns
def test_a_second_signal_aborts_requests_in_flight(own_engine):
    with serving(own_engine, drain_seconds=600) as running, running.connect() as connection:
        connection.sendall(post(CHAT, LONG))
        wait_for(lambda: own_engine.stats().num_running == 1)
        stop(running)
        wait_for(lambda: own_engine.health().status == "draining")
        stop(running)
        answer = receive_all(connection)
        assert b"HTTP/1.1 503" in answer and b"shut down before the completion was finished" in answer
        running.thread.join(30)
        assert not running.thread.is_alive()


@pytest.mark.spawns
def test_an_incomplete_body_does_not_delay_shutdown(own_engine, monkeypatch):
    from mmvllm.server import run

    monkeypatch.setattr(run, "SEND_SECONDS", 0.2)
    with serving(own_engine, drain_seconds=0.2) as running, running.connect() as connection:
        connection.sendall(post("/v1/completions", {})[:-1])  # the last byte is never sent
        wait_for(lambda: any(one.cycle is not None for one in running.server.server_state.connections))
        stop(running)
        running.thread.join(30)
        assert not running.thread.is_alive()


@pytest.mark.spawns
def test_while_draining_health_is_503_and_requests_are_refused(own_engine):
    with serving(own_engine) as running:
        closing = threading.Thread(target=asyncio.run, args=(own_engine.shutdown(),))
        with running.connect() as connection, running.client() as client:
            connection.sendall(post(CHAT, LONG | {"stream": True}))
            receive_until(connection, b'"content":"A')
            closing.start()
            wait_for(lambda: own_engine.health().status == "draining")
            answer = running.get("/health")
            assert (answer.status_code, answer.json()["status"]) == (503, "draining")
            assert running.get("/health/live").status_code == 200
            with pytest.raises(openai.InternalServerError) as refused:
                client.chat.completions.create(**chat("Hello"))
            assert refused.value.status_code == 503 and refused.value.code == "engine_unavailable"
        closing.join()
        assert running.get("/health/live").status_code == 503


@pytest.mark.network
def test_a_port_in_use_is_reported_before_a_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--model", "/nowhere/at/all"]) == 2
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in error and "--port" in error


@pytest.mark.network
@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6_addresses_are_supported():
    try:
        listener = listen("::1", 0)
    except OSError:
        pytest.skip("no IPv6 address here")
    with listener:
        assert listener.family == socket.AF_INET6


@pytest.mark.parametrize("name", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_missing_package_is_reported_with_the_extra(monkeypatch, capsys, name):
    monkeypatch.setattr(serve, "find_spec", lambda wanted: None if wanted == name else object())
    assert main(["serve"]) == 2
    assert f'{name} is not installed; pip install "mmvllm[serve]"' in capsys.readouterr().err


def test_the_demo_needs_its_extra(monkeypatch, capsys):
    monkeypatch.setattr(serve, "find_spec", lambda wanted: None if wanted == "gradio" else object())
    assert main(["serve", "--demo"]) == 2
    assert 'pip install "mmvllm[demo]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drain-timeout", "-1"], "not a number of seconds above 0"),
        (["--max-waiting", "-1"], "not a whole number"),
        (["--host", "no host"], "cannot listen on no host:0"),
        (["--api-key", "ok", "secr\x0bet"], "--api-key must be a key of printable ASCII characters"),
        (["--cors-origin", "example.org"], "--cors-origin: 'example.org' is not an origin"),
        (["--cors-origin", "https://example.org/"], "is not an origin"),
        (["--image-timeout", "0"], "'0' is not a number of seconds above 0"),
        (["--drain-timeout", "soon"], "'soon' is not a number of seconds"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, message):
    try:
        code = main(["serve", "--port", "0", *arguments])
    except SystemExit as error:
        code = error.code
    told = capsys.readouterr().err
    assert code == 2 and message in told and "secr" not in told


def test_keys_are_read_from_the_command_line_and_the_environment(monkeypatch):
    monkeypatch.setenv(serve.KEY_VARIABLE, "from-env\n")
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["--api-key", " a", "b", "--api-key", "c\r\n"])
    assert serve._api_keys(args) == ("a", "b", "c", "from-env")
    monkeypatch.delenv(serve.KEY_VARIABLE)
    assert serve._api_keys(parser.parse_args([])) == ()


def test_keys_of_python_are_checked_and_not_shown():
    settings = ServerSettings(model_names=("m",), api_keys=(" secret\r\n", "b"))
    assert settings.api_keys == ("secret", "b") and "secret" not in repr(settings)
    for key in ("secr\net", "secrét", "", " "):
        with pytest.raises(ValueError, match=r"one of api_keys (must be a key of printable|is empty)") as refused:
            ServerSettings(model_names=("m",), api_keys=("b", key))
        assert "secr" not in str(refused.value)
    with pytest.raises(ValueError, match="api_keys must be a tuple of keys, got a string"):
        ServerSettings(model_names=("m",), api_keys="secret")


@pytest.mark.network
@pytest.mark.spawns
def test_the_command_serves_until_a_signal_and_exits_with_0():
    command = [sys.executable, "-m", "mmvllm", "serve", "--port", "0", "--device", "cpu", "--num-kvcache-blocks", "64"]
    command += ["--served-model-name", "shapes", "--access-log"]
    environment = os.environ | {serve.KEY_VARIABLE: "secret"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("shapes is served at http://127.0.0.1:") and line.endswith("/v1\n")
            url = line.split()[-1]
            assert httpx.get(f"{url}/models", timeout=60).status_code == 401
            with openai.OpenAI(base_url=url, api_key="secret") as client:
                answer = client.completions.create(model="shapes", prompt="A small", max_tokens=4)
            assert answer.choices[0].finish_reason in ("length", "stop")
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert out == "" and '"POST /v1/completions HTTP/1.1" 200' in err and "Traceback" not in err
