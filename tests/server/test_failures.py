"""Timeouts, full queues, device errors, and unexpected exceptions."""

import asyncio
import gc
import json
import threading

import pytest

from mmvllm.errors import EngineStopped, EngineUnavailable
from mmvllm.server.chat.protocol import ChatRequest
from mmvllm.server.common import media
from mmvllm.server.common.jobs import CompletionJob
from mmvllm.server.errors import from_engine
from mmvllm.server.http import sse
from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    LONG,
    call,
    chat,
    completion,
    data_uri,
    error_of,
    image_part,
    is_idle,
    make_app,
    metric_samples,
    post,
    receive_all,
    receive_until,
    serving,
    video_part,
    wait_for,
)
from tests.server.refusals import check_refusal


def raising(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_a_timeout_is_a_504_or_an_event(make_engine, streams):
    engine = make_engine()
    app = make_app(engine, request_timeout=3.0 if streams else 0.1)
    answer = call(app, "POST", CHAT, json=LONG | {"stream": streams})
    if streams:  # the first token was in time
        assert answer.status_code == 200 and "[DONE]" not in answer.text
        *_, last = answer.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    else:
        assert answer.status_code == 504 and error_of(answer)["code"] == "deadline_exceeded"
        assert error_of(answer)["message"] == "the completion was not finished after 0.1 seconds"
    wait_for(lambda: is_idle(engine))


@pytest.mark.network
@pytest.mark.spawns
def test_requests_over_capacity_are_a_429_until_there_is_room(make_engine):
    engine = make_engine(max_num_seqs=1, max_waiting=0)
    app = make_app(engine)
    with serving(engine) as running, running.connect() as connection:
        connection.sendall(post(CHAT, LONG))
        wait_for(lambda: engine.stats().num_running == 1)
        for stream in (False, True):
            answer = call(app, "POST", CHAT, json=chat("Hello", stream=stream))
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert error_of(answer)["type"] == "rate_limit_error"
        connection.close()
        wait_for(lambda: is_idle(engine))
        assert call(app, "POST", CHAT, json=chat("Hello", max_tokens=1)).status_code == 200


def test_more_prompts_than_the_capacity_are_a_400(engine, monkeypatch):
    monkeypatch.setattr(engine, "max_requests", 2)
    app = make_app(engine)
    assert call(app, "POST", COMPLETIONS, json=completion(prompt=["a", "b"])).status_code == 200
    body = completion(prompt=["a", "b", "c"])
    check_refusal(app, COMPLETIONS, body, "prompt", "3 prompts; at most 2 are accepted")


@pytest.mark.spawns
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("broken", ["image", "video", "prompt", "sampling"])
def test_what_a_refused_request_held_is_freed_at_once(engine, broken, streams):
    """Its body may be large, and a garbage collection may be far."""
    contents = {
        "image": image_part(data_uri(b"no image")),
        "video": video_part("data:video/mp4;base64,AAAA"),
        "prompt": "Hello " * 20_000,
    }
    body = chat(contents.get(broken, "Hello"), stream=streams)
    if broken == "sampling":
        body["allowed_token_ids"] = [10**6]
    app = make_app(engine)
    gc.collect()
    gc.disable()
    try:
        assert call(app, "POST", CHAT, json=body).status_code == 400
        # A thread may be about to end.
        wait_for(lambda: not any(isinstance(one, (ChatRequest, CompletionJob)) for one in gc.get_objects()))
    finally:
        gc.enable()


@pytest.mark.parametrize("streams", [False, True])
def test_a_device_error_is_a_500_for_the_requests_of_that_step_only(make_engine, monkeypatch, streams):
    engine = make_engine()
    app = make_app(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine._engine.model_runner, "run", raising(RuntimeError("the device is on fire")))
        answer = call(app, "POST", CHAT, json=chat("Hello", stream=streams))
        assert answer.status_code == 500 and "on fire" in error_of(answer)["message"]
        health = call(app, "GET", "/health")
        assert (health.status_code, health.json()["status"]) == (200, "failing")
        assert "on fire" in health.json()["reason"]
    assert call(app, "POST", CHAT, json=chat("Hello", max_tokens=1)).status_code == 200
    assert call(app, "GET", "/health").json() == {"status": "ok", "reason": None}


def test_a_failed_engine_is_reported_by_all_routes(make_engine, monkeypatch):
    engine = make_engine()
    app = make_app(engine)
    monkeypatch.setattr(engine._engine.scheduler, "schedule", raising(KeyError("a mistake")))
    for _ in range(2):
        answer = call(app, "POST", CHAT, json=chat("Hello"))
        assert answer.status_code == 503 and "a mistake" in error_of(answer)["message"]
    for path in ("/health", "/health/ready", "/health/live"):
        health = call(app, "GET", path)
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert "a mistake" in health.json()["reason"]
    assert "mmvllm_ready 0.0" in call(app, "GET", "/metrics").text


def test_an_error_in_a_started_stream_is_its_last_event(make_engine, monkeypatch):
    engine = make_engine()
    runner, tokens = engine._engine.model_runner, iter(range(5))
    run = type(runner).run
    monkeypatch.setattr(
        runner,
        "run",
        lambda *args: run(runner, *args) if next(tokens, None) is not None else raising(RuntimeError("gone"))(),
    )
    answer = call(make_app(engine), "POST", CHAT, json=chat("Hello", stream=True, ignore_eos=True))
    events = [event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")]
    assert answer.status_code == 200 and "[DONE]" not in events
    assert json.loads(events[-1])["error"]["code"] == "request_failed"
    assert json.loads(events[-2])["object"] == "chat.completion.chunk"


def test_a_request_that_the_operator_aborts_is_a_500(make_engine):
    engine = make_engine()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(call(make_app(engine), "POST", CHAT, json=LONG)))
    asking.start()
    wait_for(lambda: engine.stats().num_running == 1)
    assert asyncio.run(engine.abort(next(iter(engine._streams))))
    asking.join()
    assert answers[0].status_code == 500 and "aborted by the operator" in error_of(answers[0])["message"]


def test_an_unexpected_exception_is_a_500_without_details(engine, monkeypatch, caplog):
    monkeypatch.setattr("mmvllm.server.chat.serving.chat_params", raising(ZeroDivisionError("secret")))
    app = make_app(engine, cors_origins=("https://example.org",))
    answer = call(app, "POST", CHAT, json=chat("Hello"), headers={"Origin": "https://example.org"})
    assert answer.status_code == 500 and "secret" not in error_of(answer)["message"]
    assert answer.headers["access-control-allow-origin"] == "https://example.org"
    assert f"request {answer.headers['x-request-id']} failed: POST {CHAT}" in caplog.text
    assert metric_samples(app)["mmvllm_http_responses_total", ("path", CHAT), ("status", "500")] == 1


def test_a_path_cannot_break_a_line_of_the_log(engine, monkeypatch, caplog):
    app = make_app(engine)
    monkeypatch.setattr("mmvllm.server.chat.serving.chat_params", raising(ZeroDivisionError()))
    assert call(app, "POST", f"{CHAT}%0A", json=chat("Hello")).status_code == 500
    assert f"POST {CHAT}%0A" in caplog.text


@pytest.mark.network
@pytest.mark.spawns
def test_pings_are_sent_before_the_first_token(make_engine, monkeypatch):
    """Proxies cut a response that has not begun."""
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    engine = make_engine()
    real, pings = engine._engine.step, threading.Event()
    monkeypatch.setattr(engine._engine, "step", lambda: pings.wait(20) and real())
    with serving(engine) as running, running.connect() as connection:
        connection.sendall(post(CHAT, chat("Hello", stream=True, max_tokens=2, ignore_eos=True), "Connection: close"))
        begun = receive_until(connection, b": ping")
        assert b"HTTP/1.1 200" in begun and b"data: " not in begun
        pings.set()
        assert b'"role":"assistant"' in (rest := receive_all(connection)) and b"data: [DONE]" in rest


def tells_of_pings(app, pinged: threading.Event):
    """The application, which tells when it has sent a ping."""

    async def application(scope, receive, send):
        async def sending(message):
            await send(message)
            if message.get("body", b"").startswith(b": ping"):
                pinged.set()

        await app(scope, receive, sending)

    return application


def test_an_error_after_pings_is_an_event(make_engine, monkeypatch):
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    engine, pinged = make_engine(), threading.Event()
    monkeypatch.setattr(engine._engine, "step", lambda: pinged.wait(20) and raising(KeyError("a mistake"))())
    answer = call(tells_of_pings(make_app(engine), pinged), "POST", CHAT, json=chat("Hello", stream=True))
    *pings, event = answer.text.strip().split("\n\n")
    assert answer.status_code == 200 and set(pings) == {": ping"}
    assert "a mistake" in json.loads(event.removeprefix("data: "))["error"]["message"]


def test_an_unexpected_exception_after_pings_is_an_event_without_details(engine, monkeypatch, caplog):
    pinged = threading.Event()

    async def fetch(*_):
        await asyncio.to_thread(pinged.wait, 20)
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    monkeypatch.setattr(media, "fetch", fetch)
    app = tells_of_pings(make_app(engine), pinged)
    answer = call(app, "POST", CHAT, json=chat(image_part(data_uri()), stream=True))
    *pings, event = answer.text.strip().split("\n\n")
    assert answer.status_code == 200 and set(pings) == {": ping"}
    error = json.loads(event.removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "secret" not in error["message"]
    assert f"request {answer.headers['x-request-id']} failed: POST {CHAT}" in caplog.text


def check_out_of_memory(answer) -> None:
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert error_of(answer)["code"] == "out_of_memory" and "not enough memory" in error_of(answer)["message"]


@pytest.mark.spawns
@pytest.mark.parametrize("streams", [False, True])
def test_too_little_memory_for_an_image_is_a_503(engine, monkeypatch, caplog, streams):
    monkeypatch.setattr("mmvllm.media.decoding.Image.frombytes", raising(MemoryError()))
    body = chat(image_part(data_uri()), stream=streams)
    check_out_of_memory(call(make_app(engine), "POST", CHAT, json=body))
    wait_for(lambda: is_idle(engine))
    assert not caplog.records


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("http.body.json.loads", "Hi"),
        ("common.media.fetch", image_part(data_uri())),
        ("chat.serving.chat_params", "Hi"),
        ("common.job_response.usage_of", "Hi"),
    ],
)
def test_too_little_memory_for_a_request_or_its_response_is_a_503(engine, monkeypatch, caplog, place, part):
    app, body = make_app(engine), json.dumps(chat(part, max_tokens=1))
    with monkeypatch.context() as patch:
        patch.setattr(f"mmvllm.server.{place}", raising(MemoryError()))
        answer = call(app, "POST", CHAT, content=body, headers={"Content-Type": "application/json"})
    check_out_of_memory(answer)
    wait_for(lambda: is_idle(engine))
    assert not caplog.records


@pytest.mark.parametrize(("kind", "headers"), [(EngineUnavailable, {"Retry-After": "1"}), (EngineStopped, None)])
def test_clients_are_told_to_repeat_what_engines_that_start_refuse(kind, headers):
    error = from_engine(kind("no engine is up"))
    assert error.status_code == 503 and error.code == "engine_unavailable" and error.headers == headers
