"""`--log-requests`: a line for each completion request when it ends, and traces of requests that come over HTTP."""

import json
import logging

import pytest

from mmvllm import AsyncLLM
from mmvllm.server.common import descriptions
from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ENGINE,
    LONG,
    call,
    chat,
    chunks_of,
    completion,
    data_uri,
    image_part,
    make_app,
    serving,
    user,
    wait_for,
)
from tests.helpers.serving.traces import TRACE, headers
from tests.server.refusals import refusal

SECRET = "a\nsecret\x1b[31m\x7f\u2028"


@pytest.fixture
def lines(caplog):
    """Call it for what has been logged since the last call."""

    def take() -> list[dict]:
        made = [record.getMessage() for record in caplog.records if record.name == "mmvllm.requests"]
        caplog.clear()
        assert all(line.startswith("request ") and line.isascii() and line.isprintable() for line in made)
        return [json.loads(line.removeprefix("request ")) for line in made]

    yield take
    logging.getLogger("mmvllm.requests").setLevel(logging.NOTSET)


@pytest.mark.spawns
@pytest.mark.parametrize("stream", [False, True])
def test_a_line_has_the_facts_of_a_request_and_nothing_of_its_texts(engine, lines, stream):
    app = make_app(engine, log_requests="facts")
    body = chat(SECRET, image_part(data_uri()), max_tokens=3, ignore_eos=True, n=2, stream=stream)
    response = call(app, "POST", CHAT, json=body, headers=headers())
    (line,) = lines()
    assert line["request_id"] == response.headers["x-request-id"] and line["traceparent"] == headers()["traceparent"]
    assert line["id"].startswith("chatcmpl-") and line["id"] in response.text
    expected = {"model": "bundled", "status": 200, "error": None, "stream": stream, "images": 1, "videos": 0}
    assert expected.items() <= line.items() and line["finish_reasons"] == ["length", "length"]
    assert line["completion_tokens"] == 6 and line["prompt_tokens"] > line["image_tokens"] > 0
    assert stream or line["prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
    times = ("preparation_s", "queue_s", "first_token_s", "total_s")
    assert all(0 <= line[name] <= line["total_s"] for name in times)
    assert "secret" not in json.dumps(line) and line.keys().isdisjoint({"prompt", "completions"})


@pytest.mark.spawns
def test_texts_are_logged_on_request_in_one_line_each_and_shortened(engine, lines, monkeypatch):
    monkeypatch.setattr(descriptions, "MAX_TEXT", 20)
    app = make_app(engine, log_requests="full")
    body = chat(SECRET, image_part(data_uri()), max_tokens=3, ignore_eos=True)
    text = call(app, "POST", CHAT, json=body).json()["choices"][0]["message"]["content"]
    call(app, "POST", COMPLETIONS, json=completion(prompt=["x" * 25, "y"]))
    first, second = lines()
    content = f"{SECRET}<image>"[:20] + "... (22 characters)"
    assert first["prompt"] == [{"role": "user", "content": content}] and first["completions"] == [text]
    assert second["prompt"] == [f"{'x' * 20}... (25 characters)", "y"]
    assert len(second["completions"]) == 2


@pytest.mark.spawns
def test_requests_for_embeddings_are_logged(engine, lines):
    app = make_app(engine, log_requests="full")
    given = [{"input": ["x", "y"]}, {"messages": [user(image_part(data_uri()), "x")]}]
    answers = [call(app, "POST", EMBEDDINGS, json={"model": "bundled", **one}).json() for one in given]
    first, second = lines()
    assert [first["id"], second["id"]] == [answer["id"] for answer in answers]
    assert (first["model"], first["prompt"], first["completions"]) == ("bundled", ["x", "y"], [])
    assert first["finish_reasons"] == []
    assert (second["prompt"], second["images"]) == ([{"role": "user", "content": "<image>x"}], 1)
    assert first["prompt_tokens"] == answers[0]["usage"]["prompt_tokens"] and first["completion_tokens"] == 0


@pytest.mark.spawns
def test_requests_that_fail_are_logged(engine, lines):
    app = make_app(engine, log_requests="facts")
    refusal(app, CHAT, chat(image_part("data:image/png;base64,AAAA")))
    refusal(app, CHAT, chat("x " * 2000))
    first, second = lines()
    assert (first["status"], first["error"], first["finish_reasons"]) == (400, "invalid_request", [])
    assert (second["status"], second["error"]) == (400, "context_length_exceeded")


@pytest.mark.network
@pytest.mark.spawns
def test_a_client_that_hangs_up_is_logged(make_engine, lines):
    engine = make_engine()
    with serving(engine, log_requests="facts") as running:
        with running.client().chat.completions.create(**LONG_STREAM) as stream:
            next(iter(stream))
        found = []
        wait_for(lambda: found.extend(lines()) or found)
    assert found[0]["status"] == 499 and found[0]["finish_reasons"] == []


LONG_STREAM = {key: value for key, value in LONG.items() if key != "ignore_eos"} | {
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


def test_nothing_is_logged_unless_it_is_asked_for(engine, lines):
    call(make_app(engine), "POST", CHAT, json=chat("x", max_tokens=1))
    assert lines() == []


@pytest.mark.network
@pytest.mark.spawns
def test_a_request_over_http_belongs_to_the_trace_of_its_caller(monkeypatch):
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    monkeypatch.setattr(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter", lambda url, **_: exporter
    )
    with serving(AsyncLLM(**ENGINE, otlp_traces_endpoint="http://127.0.0.1:1")) as running:
        client = running.client()
        client.chat.completions.create(**chat("x", max_tokens=1), extra_headers=headers())
    (root,) = (span for span in exporter.get_finished_spans() if span.name == "llm_request")
    assert f"{root.context.trace_id:032x}" == TRACE


@pytest.mark.parametrize("path, body", [(CHAT, chat("x", max_tokens=2)), (COMPLETIONS, completion())])
def test_usage_has_its_details_also_in_streams(engine, path, body):
    app = make_app(engine)
    wanted = call(app, "POST", path, json=body).json()["usage"]
    assert wanted["prompt_tokens_details"].keys() == {"cached_tokens", "image_tokens", "video_tokens"}
    last = chunks_of(app, path, body | {"stream_options": {"include_usage": True}})[-1]
    assert last["usage"] == wanted
