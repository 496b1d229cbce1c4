"""Random input: each request gets a completion or an error below 500, and responses match the schema."""

import base64
import contextlib
import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from mmvllm.processors.videos import qwen_vl_utils
from mmvllm.server.app import build_app
from mmvllm.server.chat.protocol import ChatRequest
from mmvllm.server.completions.protocol import CompletionRequest
from mmvllm.server.embeddings.protocol import EmbeddingRequest
from mmvllm.server.responses.protocol import ResponsesRequest
from mmvllm.server.settings import ServerSettings
from tests.helpers.media.images import encode
from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    call,
    data_uri,
    error_of,
    image_part,
    is_idle,
    png,
    receive_until,
    user,
    video_part,
    video_uri,
    wait_for,
)

BOUNDED = settings(
    max_examples=60,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)

FRAMES = [Image.new("RGB", (40, 30), (40 * i, 90, 0)) for i in range(5)]
JPEG = encode(FRAMES[0], "JPEG")
GIF = encode(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:], duration=200)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
parts = (
    st.sampled_from([{"type": "text", "text": "Hi"}, image_part(data_uri(png(30, 40))), image_part("http://10.0.0.1/")])
    | st.builds(
        lambda url, options: video_part(url) | options,
        st.sampled_from([video_uri(GIF), "data:video/jpeg;base64," + base64.b64encode(JPEG).decode(), "file:///a.mp4"]),
        st.dictionaries(
            st.sampled_from(qwen_vl_utils.KEYS), st.integers(-1, 900) | st.floats(-1, 9) | scalars, max_size=3
        ),
    )
    | values
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.lists(parts, max_size=3)}
    )
    | st.just(user("Hi"))
    | values,
    max_size=3,
)
video_options = st.dictionaries(
    st.sampled_from(["fps", "num_frames", "min_pixels", "max_pixels"]), st.integers(1, 40000) | scalars, max_size=2
)
prompts = st.text(max_size=20) | st.lists(st.integers(0, 800), max_size=9) | values


SHORT = {"model": "bundled", "min_tokens": None}
LIMITS = {  # so that what is generated is short
    CHAT: SHORT | {"max_tokens": 2, "max_completion_tokens": None},
    COMPLETIONS: SHORT | {"max_tokens": 2},
    RESPONSES: SHORT | {"max_output_tokens": 2},
    EMBEDDINGS: {"model": "bundled"},
    "/tokenize": {"model": "bundled"},
    "/detokenize": {"model": "bundled"},
}

header_names = st.sampled_from(
    [
        *("Content-Length", "Transfer-Encoding", "Content-Type", "Content-Encoding", "Expect", "Connection", "Host"),
        *("Authorization", "Accept", "Accept-Encoding", "Origin", "Range", "Upgrade", "Cookie", "X-Forwarded-For"),
    ]
) | st.text("aZ-_0", min_size=1, max_size=8)
header_values = st.sampled_from(
    [
        "",
        "0",
        "2",
        "5",
        "-1",
        "9" * 30,
        "chunked",
        "gzip",
        "100-continue",
        "close",
        "application/json",
        "websocket",
        "*",
    ]
) | st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=20)


def fields(model) -> st.SearchStrategy[dict]:
    """Some fields of a request, with random values."""
    names = sorted(set(model.model_fields) - {"model", "messages", "prompt", "input", "max_tokens"})
    likely = st.sampled_from([None, 0, 1, 2, 0.5, True, "stop", [], [3], {}])
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=3), likely | values, max_size=3)


@pytest.fixture(scope="module")
def app(engine):
    return build_app(engine, ServerSettings(model_names=("bundled",), request_timeout=20))


def check(app, path: str, body) -> None:
    answer = call(app, "POST", path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error_of(answer)


@BOUNDED
@given(messages=messages, keys=fields(ChatRequest), kwargs=st.none() | video_options)
def test_any_chat_request_is_completed_or_refused(app, messages, keys, kwargs):
    body = {"model": "bundled", "messages": messages, "max_tokens": 2, "mm_processor_kwargs": kwargs}
    check(app, CHAT, body | keys)


@BOUNDED
@given(prompt=prompts, keys=fields(CompletionRequest))
def test_any_completion_request_is_completed_or_refused(app, prompt, keys):
    check(app, COMPLETIONS, {"model": "bundled", "prompt": prompt, "max_tokens": 2} | keys)


@BOUNDED
@given(given=values, keys=fields(ResponsesRequest))
def test_any_request_for_a_response_is_completed_or_refused(app, given, keys):
    check(app, RESPONSES, {"model": "bundled", "input": given, "max_output_tokens": 2} | keys)


@BOUNDED
@given(given=prompts, messages=st.none() | messages, keys=fields(EmbeddingRequest))
def test_any_request_for_embeddings_is_served_or_refused(app, given, messages, keys):
    check(app, EMBEDDINGS, {"model": "bundled", "input": given, "messages": messages} | keys)


@BOUNDED
@given(body=values, path=st.sampled_from([*LIMITS]))
def test_any_json_is_refused(app, body, path):
    check(app, path, body)


@BOUNDED
@given(body=st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u d8 0', max_size=40).map(str.encode))
def test_any_bytes_are_refused(app, body):
    answer = call(app, "POST", CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error_of(answer)


@pytest.mark.spawns
@pytest.mark.parametrize("path", [*LIMITS, "/v1/models", "/v1/models/{model}", "/health", "/metrics", "/version"])
def test_responses_match_the_openapi_schema(running, path):
    operations = schemathesis.openapi.from_url(f"{running.url}/openapi.json")[path]
    [operation] = operations.values()

    @settings(BOUNDED, max_examples=25)
    @given(case=operation.as_strategy())
    def validate(case):
        if isinstance(case.body, dict):
            case.body |= LIMITS.get(path, {})
        case.call_and_validate(checks=[not_a_server_error, response_schema_conformance])

    validate()


@settings(BOUNDED, max_examples=80)
@given(
    st.sampled_from(["POST", "GET", "PUT", "HEAD", "OPTIONS", "TRACE", "get", "PRI"]),
    st.sampled_from(
        [CHAT, "/health", "/v1/models", "//v1/models", "*", "http://x/version", "/%00", "/v1/%2e%2e/x", "/?a"]
    ),
    st.lists(st.tuples(header_names, header_values), max_size=5),
)
def test_any_head_gets_a_response_or_none(running, method, target, headers):
    lines = [f"{method} {target} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers), "", "{}"]
    with running.connect() as connection:
        connection.settimeout(0.1)
        with contextlib.suppress(TimeoutError, ConnectionResetError):  # the server may wait for more of the body
            connection.sendall("\r\n".join(lines).encode("latin-1"))
            answer = receive_until(connection)
            assert not answer or 100 <= int(answer.split(b" ", 2)[1]) < 500, answer
    assert running.get("/health").status_code == 200


def test_afterwards_the_engine_is_idle(engine):
    wait_for(lambda: is_idle(engine))
    assert engine.health().status == "ok"
