"""Captions from an endpoint whose answers are made to take memory or to end the job, or that has a wrong proxy."""

import base64
import gzip
import json
import logging
import threading
import tracemalloc
from pathlib import Path

import pytest
from pyarrow import parquet

from mmvllm.captioning import EndpointOptions, caption_images
from mmvllm.captioning.jobs import endpoint as endpoint_module
from mmvllm.captioning.outputs import record as record_module
from mmvllm.errors import ArgumentError
from tests.helpers.captioning.command import many
from tests.helpers.serving.drips import CERTIFICATE, DRIPS, HEAD, Host
from tests.helpers.serving.endpoints import MODELS, as_json, failed, fake_endpoint, said
from tests.helpers.serving.server import wait_for

LISTED = MODELS[2]

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def folder(tmp_path) -> Path:
    return many(tmp_path / "images", 1)


@pytest.mark.network
@pytest.mark.parametrize("coding", ["gzip", "br", "gzip, gzip"])
def test_an_answer_that_is_compressed_is_not_read(folder, coding):
    """A few bytes would be gigabytes."""
    answer = (200, {"Content-Encoding": coding}, gzip.compress(bytes(10**7)))
    with fake_endpoint(lambda body, _: answer) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=EndpointOptions(fake.url, max_retries=0))
    assert record["error"] == f"the endpoint failed: its answer is compressed ({coding}), which was not asked for"
    assert fake.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.network
def test_the_coding_of_an_answer_is_shown_without_the_key(folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-key")
    answer = (200, {"Content-Encoding": "sk-very-secret-key"}, b"{}")
    with fake_endpoint(lambda body, _: answer) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=EndpointOptions(fake.url, max_retries=0))
    assert "compressed (***)" in record["error"]


@pytest.mark.network
@pytest.mark.parametrize("written", [r"sk-very-\u0073ecret-key", r"sk-very\u002dsecret\u002Dkey"])
def test_a_key_that_an_object_would_have_is_no_caption(folder, monkeypatch, written):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-key")
    schema = {"type": "object", "properties": {"tag": {"type": "string"}}}
    with fake_endpoint(lambda body, _: said(f'{{"tag": "{written}"}}')) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url, schema=schema)
    assert record["error"] == "the endpoint's answer has the API key or the password in it" and not record["object"]


@pytest.mark.network
@pytest.mark.parametrize(
    ("login", "sent"), [("user:hunter2secret", "user:hunter2secret"), ("hunter2secret", "hunter2secret:")]
)
def test_no_log_has_the_login_of_the_url(folder, caplog, login, sent):
    """The HTTP client logs the URL of each request, where a program shows messages of that level."""
    caplog.set_level(logging.DEBUG)
    with fake_endpoint(lambda body, _: said("a")) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url.replace("//", f"//{login}@"))
    assert record["caption"] == "a" and "hunter2secret" not in caplog.text and "chat/completions" in caplog.text
    assert fake.headers[0]["Authorization"] == f"Basic {base64.b64encode(sent.encode()).decode()}"


LARGE = {
    "an emoji": lambda: "\U0001f600" + "a" * 1_000_000,
    "lists": lambda: f"[{'[],' * 49_000}[]]",
    "objects": lambda: "[" + '{"a": 0.5},' * 49_000 + "0]",
    "keys": lambda: json.dumps({f"{i}": [] for i in range(49_000)}),
    "as many bytes as are read": lambda: "a" * endpoint_module.MAX_BYTES,
    "lists of as many bytes": lambda: f"[{'[],' * 349_000}[]]",
}


@pytest.mark.network
@pytest.mark.parametrize("kind", LARGE)
def test_an_answer_takes_a_few_megabytes(kind, folder):
    """Several are in flight, and with `ordered` many more wait for an earlier one."""
    answer, schema = said(LARGE[kind]()), {"type": ["object", "array"]}
    with fake_endpoint(lambda body, _: answer) as fake:
        options = EndpointOptions(fake.url, max_retries=0)
        tracemalloc.start()
        for _ in caption_images(folder / "000.png", endpoint=options, schema=schema, ordered=True):
            pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 30_000_000


@pytest.mark.network
def test_no_cookie_is_kept(tmp_path):
    """They would be sent with every request, and take memory without end."""
    status, headers, data = said("a")
    answer = status, headers | {"Set-Cookie": "a=b; Path=/"}, data
    with fake_endpoint(lambda body, _: answer) as fake:
        records = [*caption_images(many(tmp_path / "images", 3), endpoint=EndpointOptions(fake.url))]
    assert len(records) == 3 and not any("Cookie" in headers for headers in fake.headers)


@pytest.mark.network
@pytest.mark.parametrize("number", [300_000_000, 2**31 - 1, 2**31, -1, 10**30, 1e400, "x", [5]])
@pytest.mark.parametrize("name", ["completion_tokens", "prompt_tokens"])
def test_a_number_of_tokens_takes_no_memory_and_may_be_wrong(folder, tmp_path, number, name):
    (_, _, data) = said("a")
    answer = as_json(200, json.loads(data) | {"usage": {name: number}})
    output = tmp_path / "out.parquet"
    with fake_endpoint(lambda body, _: answer) as fake:
        options = EndpointOptions(fake.url, max_retries=0)
        tracemalloc.start()
        (record,) = caption_images(folder / "000.png", endpoint=options, output=output)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 50_000_000
    if isinstance(number, int) and 0 <= number < 2**31:
        assert (record["error"], record[name]) == (None, number)
    else:
        assert record["error"] == "the endpoint failed: its answer is not a chat completion"


@pytest.mark.network
@pytest.mark.parametrize("when", ["Fri, 31 Dec 99999 23:59:59 GMT", "Fri, 31 Dec 99999999999999999999 23:59:59 GMT"])
def test_a_time_to_wait_that_cannot_be_read_is_none(folder, when):
    with fake_endpoint(lambda body, number: said("a") if number else failed(503, Retry_After=when)) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url)
    assert record["caption"] == "a"


@pytest.mark.network
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("written", ["http://user:pa55word99@", "user:pa55word99@"])
def test_the_login_of_a_proxy_that_repeats_it_is_not_shown(folder, monkeypatch, scheme, written):
    login = "dXNlcjpwYTU1d29yZDk5 user:pa55word99"
    proxy = Host(f"HTTP/1.1 407 {login}\r\nContent-Length: {len(login)}\r\n\r\n{login}")
    monkeypatch.setenv(f"{scheme}_proxy", proxy.url.replace("http://", written))
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(ArgumentError, match=r"endpoint (cannot be reached|does not list)") as refused:
        caption_images(folder, endpoint=f"{scheme}://images.example")
    proxy.close()
    assert proxy.heads and "pa55word99" not in str(refused.value) and "dXNl" not in str(refused.value)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "nothing://user:pa55word99@127.0.0.1", "http://[::1"])
def test_a_proxy_that_cannot_be_used_is_a_sentence(folder, monkeypatch, proxy):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ArgumentError, match="endpoint cannot be reached") as refused:
        caption_images(folder, endpoint="http://localhost:9")
    assert "pa55word99" not in str(refused.value)


@pytest.mark.network
@pytest.mark.parametrize("first", [DRIPS["a head"], DRIPS["interim responses"], DRIPS["a body of known length"]])
@pytest.mark.parametrize("tls", [False, True])
def test_a_try_that_is_over_leaves_no_thread_and_no_connection(folder, first, tls, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    models = (HEAD + f"Content-Length: {len(LISTED)}\r\n\r\n").encode() + LISTED
    host = Host([models.decode(), *[first] * 99], tls=tls)
    before = {*threading.enumerate()}
    options = EndpointOptions(host.url, timeout=0.2, max_retries=3)
    (record,) = caption_images(folder / "000.png", endpoint=options)
    assert record["error"] == "the endpoint failed (4 times): it did not answer in time"
    wait_for(lambda: not [one for one in {*threading.enumerate()} - before if one.name == "mmvllm-limited"])
    wait_for(lambda: host.num_open == 0)
    host.close()


@pytest.mark.network
@pytest.mark.parametrize("made", [{"title": 1, "features": 5}, {"price": "abc"}, {"number": "5", "is_new": 1}, [], 5])
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_an_answer_that_does_not_fit_the_schema_has_empty_cells_in_a_table(tmp_path, folder, made, suffix):
    kinds = {"title": "string", "price": "number", "number": "integer", "is_new": "boolean"}
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    properties["features"] = {"type": "array", "items": {"type": "string"}}
    schema, output = {"type": "object", "properties": properties}, tmp_path / f"out.{suffix}"
    with fake_endpoint(lambda body, _: said(json.dumps(made))) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url, schema=schema, output=output)
    assert record["object"] == made and output.exists()
    if suffix == "parquet":
        (row,) = parquet.read_table(output).to_pylist()
        assert json.loads(row["object"]) == made
        assert {name: row[f"object.{name}"] for name in ("price", "number", "is_new", "features")} == dict.fromkeys(
            ("price", "number", "is_new", "features")
        )


@pytest.mark.network
@pytest.mark.parametrize("name", ["x-sk-0123456789", "\x1b]0;pwn\x07", "a\nforged", "x" * 513, "\ud800"])
def test_a_model_whose_name_is_no_name_is_refused(folder, tmp_path, monkeypatch, name):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    models = as_json(200, {"data": [{"id": name}]})
    with fake_endpoint(lambda body, _: said("a"), models) as fake, pytest.raises(ArgumentError) as refused:
        caption_images(folder, endpoint=fake.url, output=tmp_path / "out.jsonl")
    assert "lists a model with an invalid name" in str(refused.value) and "0123" not in str(refused.value)
    assert not [*tmp_path.glob("out.jsonl*")]


@pytest.mark.network
def test_the_models_of_an_endpoint_are_shown_shortly_and_without_control_characters(folder):
    models = as_json(200, {"data": [{"id": "\x1b]0;pwn\x07\u202eevil" + "x" * 10_000} for _ in range(20)]})
    with fake_endpoint(lambda body, _: said("a"), models) as fake, pytest.raises(ArgumentError) as refused:
        caption_images(folder, endpoint=EndpointOptions(fake.url, model="foo"))
    text = str(refused.value)
    assert "has no model 'foo'" in text and text.isprintable() and len(text) < 3000


@pytest.mark.network
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_a_caption_that_no_output_can_have_is_a_failure_and_the_job_resumes(folder, tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(record_module, "MAX_LINE_BYTES", 20_000)
    output = tmp_path / f"out.{suffix}"
    with fake_endpoint(lambda body, _: said("long " * 10_000)) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url, output=output)
        assert "its record would have" in record["error"] and record["caption"] is None
        assert list(caption_images(folder / "000.png", endpoint=fake.url, output=output)) == []
        (again,) = caption_images(folder / "000.png", endpoint=fake.url, output=output, retry_failed=True)
        assert "its record would have" in again["error"]


@pytest.mark.network
def test_a_reason_of_an_endpoint_is_cut(folder, tmp_path):
    (_, _, data) = said("a")
    made = json.loads(data)
    made["choices"][0]["finish_reason"] = "r" * 10_000
    with fake_endpoint(lambda body, _: as_json(200, made)) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url, output=tmp_path / "out.jsonl")
    assert record["error"] == f"the endpoint returned no complete text; the finish reason is {'r' * 100!r}"


@pytest.mark.network
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_half_of_an_emoji_in_an_answer_is_escaped_in_a_table(tmp_path, folder, suffix):
    schema = {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}}
    prompts, output = [{"name": "\ud800", "prompt": "a"}, {"name": "b", "prompt": "b"}], tmp_path / f"out.{suffix}"
    with fake_endpoint(lambda body, _: said('{"tags": ["\\ud83d", "x"]}')) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url, schema=schema, prompts=prompts, output=output)
    assert record["error"] is None and output.exists()
    if suffix == "parquet":
        table = parquet.read_table(output)
        assert "caption_\\ud800" in table.column_names
