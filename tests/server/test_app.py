"""The application without a server around it: statuses, errors, state."""

import asyncio
import json
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import mmvllm
from mmvllm.async_llm import AsyncLLM
from mmvllm.media import MediaPolicy
from mmvllm.server import sse
from mmvllm.server.app import build_app
from mmvllm.server.settings import ServerSettings
from tests.helpers.engines import unhurried
from tests.helpers.server import (
    CHAT,
    COMPLETIONS,
    ENGINE,
    LONG,
    SCENES,
    call,
    chat,
    data_uri,
    error_of,
    image_part,
    is_idle,
    png,
    post,
    receive_all,
    receive_until,
    serving,
    user,
    wait_for,
)


def make_app(engine, **settings):
    return build_app(engine, ServerSettings(model_names=("bundled",), **settings))


@pytest.fixture(scope="module")
def app(engine):
    return make_app(engine)


def completion(**keys) -> dict:
    return {"model": "bundled", "prompt": "Hello", "max_tokens": 1, **keys}


@pytest.fixture
def own_engine():
    """Makes an engine that a test may break."""
    made = []

    def make(**keys) -> AsyncLLM:
        made.append(unhurried(AsyncLLM(**ENGINE | keys)))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.shutdown(drain=False))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": [user("Hi")]}, "model", "is missing"),
        ({"model": "bundled"}, "messages", "is missing"),
        (chat(messages=[]), "messages", "at least 1"),
        (chat(messages="Hi"), "messages", "must be a list"),
        (chat(messages=[{"role": "user"}]), "messages[0].content", "is missing"),
        (chat(messages=[{"role": "user", "content": None}]), "messages[0].content", "must be a string"),
        (chat(messages=[user("Hi"), {"role": "tool", "content": "x"}]), "messages[1].role", "'assistant'"),
        (chat(messages=[{"role": "user", "content": []}]), "messages[0].content", "at least 1"),
        (chat({"type": "text"}), "messages[0].content[0].text", "is missing"),
        (chat("Hi", {"type": "text", "text": 5}), "messages[0].content[1].text", "must be a string"),
        (chat("Hi", {"type": "input_audio"}), "messages[0].content[1]", "'input_audio', must be 'text', 'image_url'"),
        (chat("Hi", {"type": "image_url", "image_url": "x"}), "messages[0].content[1].image_url", "must be an object"),
        (chat("Hi", response_format={"type": "json_object"}), "response_format.type", "must be 'text'"),
        (chat("Hi", {"type": "image_url"}), "messages[0].content[1].image_url", "is missing"),
        (chat(image_part(5)), "messages[0].content[0].image_url.url", "must be a string"),
        (chat(image_part("data:,", detail="huge")), "messages[0].content[0].image_url.detail", "'low'"),
        (chat(image_part("data:,", size=1)), "messages[0].content[0].image_url.size", "is not a field of this request"),
        (chat({"type": "input_audio"}), "messages[0].content[0]", "'image_url'"),
        (chat(image_part("ftp://x/y.png")), "messages[0].content[0].image_url.url", "URL"),
        (chat("Hi", temperature=-1), "temperature", "greater than or equal to 0"),
        (chat("Hi", temperature="1"), "temperature", "valid number"),
        (chat("Hi", temperature=10**400), "temperature", ""),
        (chat("Hi", top_p=0), "top_p", "greater than 0"),
        (chat("Hi", n=17), "n", "less than or equal to 16"),
        (chat("Hi", n=True), "n", "valid integer"),
        (chat("Hi", max_tokens=0), "max_tokens", "greater than or equal to 1"),
        (chat("Hi", max_tokens=5, max_completion_tokens=6), "max_tokens", "two names"),
        (chat("Hi", min_tokens=6, max_tokens=5), "min_tokens", "max_tokens=5"),
        (chat("Hi", seed=2**63), "seed", "less than"),
        (chat("Hi", stop=5), "stop", "must be a string"),
        (chat("Hi", stop=["a", ""]), "stop[1]", "at least 1 character"),
        (chat("Hi", stop="a" * 1001), "stop", "at most 1000 character"),
        (chat("Hi", top_logprobs=2), "top_logprobs", "logprobs: true"),
        (chat("Hi", logprobs=True, top_logprobs=21), "top_logprobs", "20"),
        (chat("Hi", stream_options={"include_usage": True}), "stream_options", "stream: true"),
        (chat("Hi", tools=[{"type": "function"}]), "tools", "not supported"),
        (chat("Hi", tool_choice="is missing"), "tool_choice", "'none' or 'auto'"),
        (chat("Hi", response_format={"type": "json_object"}), "response_format.type", "'text'"),
        (chat("Hi", logit_bias={"5": 1}), "logit_bias", "not supported"),
        (chat("Hi", modalities=["text", "audio"]), "modalities", ""),
        (chat("Hi", reasoning_effort="low"), "reasoning_effort", "not supported"),
        (chat("Hi", no_such_thing=1), "no_such_thing", "is not a field of this request"),
        (chat("Hi", max_pixels=10**9), "max_pixels", "at most"),
        (chat("Hi", min_pixels=10**9), "min_pixels", "at most"),
        (chat(image_part(data_uri()), min_pixels=30000, max_pixels=20000), "min_pixels", "above"),
        (chat("Hi " * 30000), "messages", "max_model_len is 2048"),
        (chat(messages=[user("")] * 2048), "messages", "at least 2048 tokens"),
        (chat("Hi", cache_salt="x" * 1025), "cache_salt", "at most 1024 characters"),
        (chat("Hi", stop_token_ids=[1] * 1025), "stop_token_ids", "at most 1024 items"),
        (chat("Hi", cache_salt="\ud800"), None, "not valid Unicode"),
        (chat("Hi <|image_pad|>"), "messages", "placeholders"),
        (chat(*[image_part(data_uri())] * 17), "messages", "--max-images"),
        (completion(prompt=[]), "prompt", "at least 1"),
        (completion(prompt=""), "prompt", "empty"),
        (completion(prompt=[[1], ["a"]]), "prompt[1][0]", "valid integer"),
        (completion(prompt=[1, -1]), "prompt[1]", "greater than or equal to 0"),
        (completion(prompt=["a"] * 65), "prompt", "at most 64"),
        (completion(prompt=[10**6]), "prompt", "token ids are integers in [0, 768)"),
        (completion(prompt=[1] * 3000), "prompt", "max_model_len is 2048"),
        (completion(echo=True), "echo", "not supported"),
        (completion(suffix="x"), "suffix", "not supported"),
        (completion(best_of=2), "best_of", "1"),
        (completion(logprobs=True), "logprobs", "valid integer"),
        ([], None, "must be an object"),
        ("Hi", None, "must be an object"),
    ],
    ids=lambda value: "" if isinstance(value, dict | list) else None,
)
def test_a_bad_request_is_told_which_field_and_why(app, body, param, words):
    path = COMPLETIONS if isinstance(body, dict) and "prompt" in body else CHAT
    answer = call(app, "POST", path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = error_of(answer)
    assert answer.status_code == 400, answer.text
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


def test_what_changes_no_answer_is_taken(app):
    ignored = dict.fromkeys(("user", "service_tier", "safety_identifier", "prompt_cache_key"), "x")
    empty = {"tools": [], "tool_choice": "none", "logit_bias": {}, "functions": None, "audio": None, "n": None}
    plain = {"response_format": {"type": "text"}, "modalities": ["text"], "metadata": {"a": "b"}, "store": False}
    answer = call(app, "POST", CHAT, json=chat("Hello", max_tokens=4, **ignored, **empty, **plain))
    assert answer.status_code == 200
    assert answer.json()["choices"] == call(app, "POST", CHAT, json=chat("Hello", max_tokens=4)).json()["choices"]
    assert call(app, "POST", COMPLETIONS, json=completion(echo=False, suffix=None, best_of=1)).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": NaN}',
        b'{"temperature": -Infinity}',
        b'{"n": ' + b"9" * 10_000 + b"}",
        b'{"temperature": 1e999}',
        b'{"model": "bundled", "model": "other"}',
        b'{"\\ud800": 1}',
        b'{"model": "\\udfff\\ud800"}',
        b'{"model": "\xff"}',
        '{"model": "bundled"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"messages": [' + b"1," * 100_000 + b"1]}",
        b'{"messages": [' + b"[]," * 2_100_000 + b"[]]}",
        b"{" + b",".join(b'"%d": 1' % i for i in range(50_000)) + b"}",
        b'{"messages": [' + b"{}," * 100_000 + b"{}]}",
        json.dumps(chat("Hi", metadata=[[]] * 100_000, max_tokens=1)).encode(),
        json.dumps(completion(user=[{}] * 100_000, max_tokens=1)).encode(),
        b'{"model": "bundled", "prompt": [' + b"[-1]," * 60 + b"[-1]]}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_odd_json_is_a_400(app, path, content):
    answer = call(app, "POST", path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert len(error_of(answer)["message"]) < 1000


def test_an_empty_body_is_told_to_be_one(app):
    answer = call(app, "POST", CHAT, content="", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and error_of(answer)["message"] == "the body is empty; send the request as JSON"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_that_is_not_said_to_be_json_is_a_415(app, kind):
    """A page from elsewhere may send the others without asking."""
    answer = call(app, "POST", CHAT, content=b'{"model": "bundled"}', headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == 415 and "Content-Type: application/json" in error_of(answer)["message"]


def test_unknown_paths_and_methods_have_errors_of_the_same_shape(app):
    answer = call(app, "GET", "/v1/embeddings")
    assert (answer.status_code, error_of(answer)["message"]) == (
        404,
        "there is no /v1/embeddings here; there are /v1/chat/completions, /v1/completions and /v1/models",
    )
    answer = call(app, "GET", CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    error_of(answer)


def test_keys_guard_v1_alone(engine):
    app = make_app(engine, api_keys=("secret",))
    answer = call(app, "POST", CHAT, json=chat("Hello"))
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert error_of(answer)["code"] == "invalid_api_key"
    assert call(app, "GET", "/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert call(app, "GET", "/health").status_code == 200


def test_pages_from_named_origins_may_call_and_see_errors(engine):
    app = make_app(engine, api_keys=("secret",), cors_origins=("https://a.example",))
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type"
    preflight = call(app, "OPTIONS", CHAT, headers=asks)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    refused = call(app, "POST", CHAT, json={}, headers={"Origin": "https://a.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"
    stranger = call(app, "OPTIONS", CHAT, headers=asks | {"Origin": "https://b.example"})
    assert stranger.status_code == 400 and "access-control-allow-origin" not in stranger.headers


def test_without_origins_no_page_may_call(app):
    answer = call(app, "GET", "/v1/models", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_details_bound_the_tokens_of_a_picture(engine):
    app = make_app(engine, max_pixels=28 * 28 * 36)
    uri = data_uri(png(600, 600))

    def tokens(*details: str | None, **keys) -> int:
        parts = [image_part(uri, **({} if detail is None else {"detail": detail})) for detail in details]
        answer = call(app, "POST", CHAT, json=chat(*parts, "Hi", max_tokens=1, **keys)).json()
        return answer["usage"]["prompt_tokens_details"]["image_tokens"]

    assert (tokens("high"), tokens("auto"), tokens(None), tokens("low")) == (49, 36, 36, 36)
    assert tokens("high", "auto") == 49 + 36
    assert tokens("auto", max_pixels=28 * 28 * 25) == 25 and tokens("low", "high", max_pixels=28 * 28 * 40) == 36 + 36


def test_pictures_come_from_where_the_operator_allows(engine, tmp_path):
    (tmp_path / "a.png").write_bytes(SCENES[0].read_bytes())
    app = make_app(engine, media=MediaPolicy(allowed_local_path=tmp_path))
    answer = call(app, "POST", CHAT, json=chat(image_part(f"file://{tmp_path}/a.png"), "Describe this image."))
    expected = call(app, "POST", CHAT, json=chat(image_part(data_uri(SCENES[0])), "Describe this image."))
    assert answer.status_code == 200 and answer.json()["choices"] == expected.json()["choices"]
    answer = call(app, "POST", CHAT, json=chat("a", image_part("file:///etc/passwd"), "b"))
    assert answer.status_code == 400 and error_of(answer)["param"] == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize("allowed", [True, False])
def test_pictures_are_fetched_from_hosts_that_are_allowed(engine, tmp_path, allowed):
    (tmp_path / "a.png").write_bytes(SCENES[0].read_bytes())
    domain = "127.0.0.1" if allowed else "example.org"
    media = MediaPolicy(allowed_domains=(domain,), allowed_networks=("127.0.0.1/32",))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=tmp_path)) as files:
        threading.Thread(target=files.serve_forever).start()
        part = image_part(f"http://127.0.0.1:{files.server_port}/a.png")
        answer = call(make_app(engine, media=media), "POST", CHAT, json=chat(part, max_tokens=1))
        files.shutdown()
    assert answer.status_code == (200 if allowed else 400)
    if not allowed:
        assert error_of(answer)["param"] == "messages[0].content[0].image_url.url"


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


def test_pictures_count_among_what_is_held(engine, tmp_path):
    (tmp_path / "a.png").write_bytes(data := SCENES[0].read_bytes())
    media = MediaPolicy(allowed_local_path=tmp_path)
    part = image_part(f"file://{tmp_path}/a.png")
    app = make_app(engine, media=media, max_bodies_bytes=len(data) + 1000)
    assert call(app, "POST", CHAT, json=chat(part, max_tokens=1)).status_code == 200
    answer = call(app, "POST", CHAT, json=chat(part, part, max_tokens=1))
    assert answer.status_code == 429 and error_of(answer)["code"] == "engine_busy"
    assert call(app, "POST", CHAT, json=chat(part, max_tokens=1)).status_code == 200


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_takes_too_long_is_a_504_or_an_event(own_engine, streams):
    engine = own_engine()
    app = make_app(engine, request_timeout=3.0 if streams else 0.1)
    answer = call(app, "POST", CHAT, json=LONG | {"stream": streams})
    if streams:  # the first token was in time
        assert answer.status_code == 200 and "[DONE]" not in answer.text
        *_, last = answer.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    else:
        assert answer.status_code == 504 and error_of(answer)["code"] == "deadline_exceeded"
        assert error_of(answer)["message"] == "the answer was not complete after 0.1 seconds"
    wait_for(lambda: is_idle(engine))


def test_the_time_for_pictures_counts_too(engine, monkeypatch):
    async def never(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr(MediaPolicy, "fetch", never)
    answer = call(make_app(engine, request_timeout=0.05), "POST", CHAT, json=chat(image_part(data_uri())))
    assert answer.status_code == 504 and "after 0.05 seconds" in error_of(answer)["message"]


def test_over_capacity_is_a_429_and_passes(own_engine):
    engine = own_engine(max_num_seqs=1, max_waiting=0)
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


def test_a_picture_that_is_sent_along_waits_for_no_slow_host(engine, monkeypatch):
    real, is_asked = MediaPolicy.fetch, asyncio.Event()

    async def fetch(policy, url):
        if url.startswith("data:"):
            return await real(policy, url)
        is_asked.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(MediaPolicy, "fetch", fetch)
    transport = httpx.ASGITransport(make_app(engine))

    async def ask() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            slow = asyncio.create_task(client.post(CHAT, json=chat(*[image_part("http://slow/")] * 16)))
            await is_asked.wait()
            answer = await asyncio.wait_for(client.post(CHAT, json=chat(image_part(data_uri()), max_tokens=1)), 20)
            slow.cancel()
        return answer.status_code

    assert asyncio.run(ask()) == 200


def test_when_full_no_picture_is_fetched_for_nothing(engine, monkeypatch):
    monkeypatch.setattr(engine, "max_requests", 0)
    monkeypatch.setattr(MediaPolicy, "fetch", None)
    assert call(make_app(engine), "POST", CHAT, json=chat(image_part(data_uri()))).status_code == 429


def test_more_prompts_than_there_is_ever_room_for_are_no_reason_to_try_again(engine, monkeypatch):
    monkeypatch.setattr(engine, "max_requests", 2)
    app = make_app(engine)
    assert call(app, "POST", COMPLETIONS, json=completion(prompt=["a", "b"])).status_code == 200
    answer = call(app, "POST", COMPLETIONS, json=completion(prompt=["a", "b", "c"]))
    assert answer.status_code == 400 and error_of(answer)["param"] == "prompt"
    assert "3 prompts, at most 2 are taken" in error_of(answer)["message"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_failure_of_the_device_is_a_500_of_those_it_hit(own_engine, monkeypatch, streams):
    engine = own_engine()
    app = make_app(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine._engine.model_runner, "run", _raise(RuntimeError("the device is on fire")))
        answer = call(app, "POST", CHAT, json=chat("Hello", stream=streams))
        assert answer.status_code == 500 and "on fire" in error_of(answer)["message"]
        health = call(app, "GET", "/health")
        assert (health.status_code, health.json()["status"]) == (200, "failing")
        assert "on fire" in health.json()["reason"]
    assert call(app, "POST", CHAT, json=chat("Hello", max_tokens=1)).status_code == 200
    assert call(app, "GET", "/health").json() == {"status": "ok", "reason": None}


def test_a_broken_engine_says_so_everywhere(own_engine, monkeypatch):
    engine = own_engine()
    app = make_app(engine)
    monkeypatch.setattr(engine._engine.scheduler, "schedule", _raise(KeyError("a mistake")))
    for _ in range(2):
        answer = call(app, "POST", CHAT, json=chat("Hello"))
        assert answer.status_code == 503 and "a mistake" in error_of(answer)["message"]
    for path in ("/health", "/health/ready", "/health/live"):
        health = call(app, "GET", path)
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert "a mistake" in health.json()["reason"]
    assert "mmvllm_ready 0.0" in call(app, "GET", "/metrics").text


def _raise(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


def test_a_failure_in_mid_stream_is_an_event_and_the_end(own_engine, monkeypatch):
    engine = own_engine()
    runner, tokens = engine._engine.model_runner, iter(range(5))
    run = type(runner).run
    monkeypatch.setattr(
        runner,
        "run",
        lambda *args: run(runner, *args) if next(tokens, None) is not None else _raise(RuntimeError("gone"))(),
    )
    answer = call(make_app(engine), "POST", CHAT, json=chat("Hello", stream=True, ignore_eos=True))
    events = [event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")]
    assert answer.status_code == 200 and "[DONE]" not in events
    assert json.loads(events[-1])["error"]["code"] == "request_failed"
    assert json.loads(events[-2])["object"] == "chat.completion.chunk"


def test_an_answer_that_the_operator_cuts_off_is_no_success(own_engine):
    engine = own_engine()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(call(make_app(engine), "POST", CHAT, json=LONG)))
    asking.start()
    wait_for(lambda: engine.stats().num_running == 1)
    assert asyncio.run(engine.abort(next(iter(engine._streams))))
    asking.join()
    assert answers[0].status_code == 500 and "cut off" in error_of(answers[0])["message"]


def test_a_mistake_of_ours_is_a_500_in_the_same_shape(engine, monkeypatch, caplog):
    monkeypatch.setattr("mmvllm.server.convert.chat_params", _raise(ZeroDivisionError("secret")))
    app = make_app(engine, cors_origins=("https://example.org",))
    answer = call(app, "POST", CHAT, json=chat("Hello"), headers={"Origin": "https://example.org"})
    assert answer.status_code == 500 and "secret" not in error_of(answer)["message"]
    assert answer.headers["access-control-allow-origin"] == "https://example.org"
    assert f"request {answer.headers['x-request-id']} failed: POST {CHAT}" in caplog.text
    assert samples(app)["mmvllm_http_responses_total", ("path", CHAT), ("status", "500")] == 1


def test_a_long_wait_for_the_first_token_is_no_silence(own_engine, monkeypatch):
    """Proxies cut a response that has not begun."""
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    engine = own_engine()
    real, pings = engine._engine.step, threading.Event()
    monkeypatch.setattr(engine._engine, "step", lambda: pings.wait(20) and real())
    with serving(engine) as running, running.connect() as connection:
        connection.sendall(post(CHAT, chat("Hello", stream=True, max_tokens=2, ignore_eos=True), "Connection: close"))
        begun = receive_until(connection, b": ping")
        assert b"HTTP/1.1 200" in begun and b"data: " not in begun
        pings.set()
        assert b'"role":"assistant"' in (rest := receive_all(connection)) and b"data: [DONE]" in rest


def test_an_error_after_a_long_wait_is_an_event(own_engine, monkeypatch):
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    engine = own_engine()
    monkeypatch.setattr(engine._engine, "step", lambda: time.sleep(0.3) or _raise(KeyError("a mistake"))())
    answer = call(make_app(engine), "POST", CHAT, json=chat("Hello", stream=True))
    *pings, event = answer.text.strip().split("\n\n")
    assert answer.status_code == 200 and set(pings) == {": ping"}
    assert "a mistake" in json.loads(event.removeprefix("data: "))["error"]["message"]


def test_a_mistake_of_ours_after_a_long_wait_is_an_event_too(engine, monkeypatch, caplog):
    async def fetch(*_):
        await asyncio.sleep(0.2)
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    monkeypatch.setattr(MediaPolicy, "fetch", fetch)
    answer = call(make_app(engine), "POST", CHAT, json=chat(image_part(data_uri()), stream=True))
    *pings, event = answer.text.strip().split("\n\n")
    assert answer.status_code == 200 and set(pings) == {": ping"}
    error = json.loads(event.removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "secret" not in error["message"]
    assert f"request {answer.headers['x-request-id']} failed: POST {CHAT}" in caplog.text


def test_what_the_server_is(app):
    assert call(app, "GET", "/version").json() == {"version": mmvllm.__version__}
    assert call(app, "GET", "/health").json() == {"status": "ok", "reason": None}
    [model] = call(app, "GET", "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("bundled", 2048)
    assert call(app, "GET", "/v1/models/a/b").status_code == 404


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health_is_there_for_those_who_ask_for_the_head_alone(running, path):
    answer = httpx.head(running.url + path, timeout=60)
    assert (answer.status_code, answer.content) == (200, b"")


def test_models_with_slashes_in_their_names_are_found(engine):
    app = build_app(engine, ServerSettings(model_names=("Qwen/Qwen2-VL-2B", "gpt-4o")))
    assert call(app, "GET", "/v1/models/Qwen/Qwen2-VL-2B").json()["id"] == "Qwen/Qwen2-VL-2B"


def test_a_model_may_have_several_names(engine):
    app = build_app(engine, ServerSettings(model_names=("ours", "gpt-4o")))
    assert [model["id"] for model in call(app, "GET", "/v1/models").json()["data"]] == ["ours", "gpt-4o"]
    for name in ("ours", "gpt-4o"):
        assert call(app, "POST", "/v1/completions", json={"model": name, "prompt": "x"}).json()["model"] == name
    refused = call(app, "POST", "/v1/completions", json={"model": "gpt-4", "prompt": "x"})
    assert refused.status_code == 404 and "only 'ours' and 'gpt-4o'" in refused.json()["error"]["message"]


def test_every_response_has_an_id_of_its_own(app):
    paths = ("/version", "/nowhere", "/v1/models/none", "/version")
    ids = [call(app, "GET", path).headers["x-request-id"] for path in paths]
    assert all(len(one) > 20 for one in ids) and len(set(ids)) == 4


def samples(app) -> dict[tuple, float]:
    text = call(app, "GET", "/metrics").text
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_who_is_refused_at_the_door_is_counted_under_the_path_that_was_asked_for(engine):
    app = build_app(engine, ServerSettings(model_names=("bundled",), api_keys=("secret",)))
    for path in (CHAT, "/v1/no-such-path"):
        assert call(app, "POST", path, json={}).status_code == 401
    counted = {key[1:]: value for key, value in samples(app).items() if key[0] == "mmvllm_http_responses_total"}
    assert counted[("path", CHAT), ("status", "401")] == counted[("path", "other"), ("status", "401")] == 1


def test_metrics_parse_and_move(app):
    before = samples(app)
    assert call(app, "POST", CHAT, json=chat(image_part(data_uri()), max_tokens=3, ignore_eos=True, n=2)).is_success
    assert call(app, "POST", CHAT, json={}).status_code == 400
    assert call(app, "GET", "/no/such/path").status_code == 404
    after = samples(app)

    def moved(name: str, **labels: str) -> float:
        key = (name, *sorted(labels.items()))
        return after[key] - before.get(key, 0.0)

    assert moved("mmvllm_http_responses_total", path=CHAT, status="200") == 1
    assert moved("mmvllm_http_responses_total", path=CHAT, status="400") == 1
    assert moved("mmvllm_http_responses_total", path="other", status="404") == 1
    assert moved("mmvllm_answers_total", finish_reason="length") == 2
    assert moved("mmvllm_output_tokens_total") == 6 and moved("mmvllm_images_total") == 1
    assert moved("mmvllm_prompt_tokens_total") > 10 and moved("mmvllm_requests_finished_total") == 1
    for name in ("first_token", "per_token", "end_to_end"):
        assert moved(f"mmvllm_{name}_seconds_count") == 1 and moved(f"mmvllm_{name}_seconds_sum") > 0
    assert after["mmvllm_ready",] == 1 and after["mmvllm_sequences_running",] == 0
