"""Captions from an OpenAI-compatible server: that of mmvllm, and one that misbehaves."""

import asyncio
import base64
import io
import json
import os
import threading
import time
from itertools import repeat
from pathlib import Path
from urllib.parse import quote

import pytest
from PIL import Image

from mmvllm import LLM
from mmvllm.captioning import EndpointOptions, caption_images
from mmvllm.captioning.errors import JobError
from mmvllm.captioning.jobs import endpoint as endpoint_module
from mmvllm.captioning.jobs.endpoint_source import data_uri
from mmvllm.cli.main import main
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.errors import ArgumentError
from tests.helpers.captioning.command import many, records
from tests.helpers.engine.requests import noise_image
from tests.helpers.serving.drips import DRIPS, Host
from tests.helpers.serving.endpoints import as_json, failed, fake_endpoint, said
from tests.helpers.serving.server import ENGINE, SCENES, serving

pytestmark = pytest.mark.usefixtures("quick_retries")

PROMPTS = ["Describe this image.", {"name": "count", "prompt": "How many stars are there?"}]


@pytest.fixture
def folder(tmp_path) -> Path:
    return many(tmp_path / "images", 4)


@pytest.mark.network
@pytest.mark.spawns
def test_the_captions_of_a_server_are_those_of_an_engine_here(tmp_path):
    images = SCENES[:4]
    settings = {"prompts": PROMPTS, "max_tokens": 24, "system": "Be short."}
    engine = AsyncLLM(**ENGINE)
    try:
        with serving(engine) as running:
            made = [
                *caption_images(images, endpoint=running.url, ordered=True, output=tmp_path / "o.jsonl", **settings)
            ]
            stats = engine.stats()
    finally:
        asyncio.run(engine.shutdown(drain=False))
    assert stats.num_encoded_images == 4 and stats.num_cached_tokens > 0  # by the second prompts
    with LLM(**ENGINE) as llm:
        local = [*caption_images(images, llm=llm, ordered=True, **settings)]
    same = ("path", "digest", "width", "height", "caption", "prompt", "error", "prompt_tokens", "completion_tokens")
    for one, other in zip(made, local, strict=True):
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
        assert one["captions"] == other["captions"]
    assert made[0]["model"] == "bundled" and records(tmp_path / "o.jsonl") == made


@pytest.mark.network
def test_a_caption_without_a_limit_is_asked_for_without_one(folder):
    with fake_endpoint(lambda body, _: said("a")) as fake:
        assert [*caption_images(folder / "000.png", endpoint=fake.url, max_tokens=-1)]
    assert "max_tokens" not in fake.bodies[0]


@pytest.mark.network
def test_a_request_has_the_settings_and_the_key_is_written_nowhere(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-7")
    with fake_endpoint(lambda body, _: said("  a dog ")) as fake:
        settings = {"temperature": 0.5, "seed": 3, "max_tokens": 9, "prefix": "> ", "chat_template_kwargs": {"a": 1}}
        made = [*caption_images(folder / "000.png", endpoint=fake.url, output=tmp_path / "out.jsonl", **settings)]
    (body,) = fake.bodies
    (message,) = body.pop("messages")
    sent = {"model": "fake-vl", "temperature": 0.5, "seed": 3, "max_tokens": 9, "chat_template_kwargs": {"a": 1}}
    assert body == sent
    image, text = message["content"]
    assert text == {"type": "text", "text": "Describe this image."}
    data = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(data)).tobytes() == Image.open(folder / "000.png").tobytes()
    assert fake.headers[0]["Authorization"] == "Bearer sk-secret-7"
    assert (made[0]["caption"], made[0]["finish_reason"], made[0]["model"]) == ("> a dog", "eos", "fake-vl")
    assert (made[0]["prompt_tokens"], made[0]["completion_tokens"]) == (7, 3)
    for path in tmp_path.glob("out.*"):
        assert "sk-secret" not in path.read_text()


@pytest.mark.network
def test_failures_that_may_pass_are_tried_again(folder):
    answers = iter(
        [failed(429, Retry_After="0"), failed(500), None, (200, {}, b"<html>"), as_json(200, {"choices": 3}), said("a")]
    )
    with fake_endpoint(lambda body, _: next(answers)) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url)
    assert record["caption"] == "a" and len(fake.bodies) == 6


@pytest.mark.network
def test_a_server_says_how_long_to_wait(folder):
    times = []

    def answer(body, number):
        times.append(time.monotonic())
        return said("a") if number else failed(429, "slow down", Retry_After="0.4")

    with fake_endpoint(answer) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url)
    assert record["caption"] == "a" and times[1] - times[0] >= 0.4


@pytest.mark.network
def test_a_request_that_hangs_is_tried_again_and_fails_in_the_end(folder):
    release = threading.Event()
    options = {"timeout": 0.1, "max_retries": 1}
    with fake_endpoint(lambda body, _: release.wait(20) and None) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=EndpointOptions(fake.url, **options))
        release.set()
    assert record["error"] == "the endpoint failed (2 times): it did not answer in time"
    assert len(fake.bodies) == 2 and record["finish_reason"] == "error"


@pytest.mark.network
def test_an_answer_that_drips_fails_in_time(folder):
    release = threading.Event()

    def drops():
        while not release.wait(0.02):
            yield b" "

    with fake_endpoint(lambda body, _: (200, {}, drops())) as fake:
        options = EndpointOptions(fake.url, timeout=2, max_retries=1)
        (record,) = caption_images(folder / "000.png", endpoint=options)
        release.set()
    assert record["error"] == "the endpoint failed (2 times): it did not answer in time" and len(fake.bodies) == 2


@pytest.mark.network
@pytest.mark.parametrize("first", DRIPS.values(), ids=DRIPS)
def test_an_endpoint_that_drips_is_refused_in_time(first, folder, monkeypatch):
    monkeypatch.setattr(endpoint_module, "CONNECT_SECONDS", 0.3)
    host = Host(first)
    with pytest.raises(ArgumentError, match="endpoint cannot be reached: it did not answer in time"):
        caption_images(folder, endpoint=host.url)
    host.close()


@pytest.mark.network
def test_an_answer_that_never_ends_is_cut(folder, monkeypatch):
    monkeypatch.setattr(endpoint_module, "MAX_BYTES", 10_000)
    with fake_endpoint(lambda body, _: (200, {}, repeat(b" " * 100))) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=EndpointOptions(fake.url, max_retries=0))
    assert record["error"] == "the endpoint failed: its answer has more than 10,000 bytes"


@pytest.mark.network
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (failed(400, "image too small"), "the endpoint refuses the request: HTTP 400, image too small"),
        (failed(503, "busy"), "the endpoint failed (3 times): HTTP 503, busy"),
        (None, "the endpoint failed (3 times): Server disconnected without sending a response."),
        ((200, {}, b"{"), "the endpoint failed (3 times): its answer is not JSON"),
        ((200, {}, b"[" + b"{}," * 50_001 + b"{}]"), "the endpoint failed (3 times): its answer is not JSON"),
        (as_json(200, [1]), "the endpoint failed (3 times): its answer is not a chat completion"),
        (
            said("A red squ", finish_reason="abort"),
            "the endpoint failed (3 times): a completion ended with the reason 'abort'",
        ),
        (
            said("A red squ", finish_reason="error"),
            "the endpoint failed (3 times): a completion ended with the reason 'error'",
        ),
        *(
            (
                said("A red squ", finish_reason=reason),
                f"the endpoint returned no complete text; the finish reason is {reason!r}",
            )
            for reason in ("content_filter", "tool_calls", "SAFETY", "RECITATION", "sensitive", "unknown")
        ),
        (
            said(None, finish_reason="content_filter"),
            "the endpoint returned no complete text; the finish reason is 'content_filter'",
        ),
    ],
)
def test_a_failure_is_that_of_its_image_alone(tmp_path, answer, error):
    folder, out = many(tmp_path / "images", 3), tmp_path / "out.jsonl"
    bad = data_uri(Image.open(folder / "001.png"), 10**6)

    def respond(body, _):
        return answer if bad in json.dumps(body) else said("a")

    with fake_endpoint(respond) as fake:
        options = EndpointOptions(fake.url, max_retries=2)
        made = [*caption_images(folder, endpoint=options, output=out, ordered=True)]
        assert [record["error"] for record in made] == [None, error, None]
        fake.answer = lambda body, _: said("b")
        (again,) = caption_images(folder, endpoint=options, output=out, retry_failed=True)
    assert again["caption"] == "b" and len(records(out)) == 3


@pytest.mark.network
def test_equal_images_are_sent_once_and_no_more_requests_at_a_time_than_asked_for(tmp_path):
    folder = many(tmp_path / "images", 8)
    noise_image(40, 40, seed=0).save(folder / "copy.bmp")
    with fake_endpoint(lambda body, _: time.sleep(0.02) or said("a")) as fake:
        made = [*caption_images(folder, endpoint=EndpointOptions(fake.url, concurrency=3))]
    assert len(made) == 9 and len(fake.bodies) == 8 and 1 < fake.most_at_once <= 3
    assert sum(record["duplicate_of"] is not None for record in made) == 1


@pytest.mark.network
def test_the_schema_is_sent_and_an_answer_of_another_form_is_an_error(folder):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answers = {0: said('{"a": 1}'), 1: said('{"a": ', finish_reason="length"), 2: said("one"), 3: said("[" * 5000)}
    with fake_endpoint(lambda _, number: answers[number]) as fake:
        job = caption_images(folder, limit=4, endpoint=EndpointOptions(fake.url, concurrency=1), schema=schema)
        made = list(job)
    sent = {"name": "caption", "schema": schema, "strict": True}
    assert all(body["response_format"] == {"type": "json_schema", "json_schema": sent} for body in fake.bodies)
    assert [record["object"] for record in made] == [{"a": 1}, None, None, None]
    assert [record["finish_reason"] for record in made] == ["eos", "length", "error", "error"]
    assert all("is not JSON" in record["error"] for record in made[2:]) and job.progress.num_cut == 1


@pytest.mark.network
def test_servers_of_mmvllm_get_the_white_space_of_json_with_the_schema(folder):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    models = as_json(200, {"data": [{"id": "fake-vl", "owned_by": "mmvllm"}]})
    with fake_endpoint(lambda *_: said('{"a": 1}'), models) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url, schema=schema)
    [body] = fake.bodies
    assert "response_format" not in body and record["object"] == {"a": 1}
    assert json.loads(body["structured_outputs"]["json"]) == schema
    assert body["structured_outputs"]["whitespace_pattern"] == " ?"


@pytest.mark.network
@pytest.mark.parametrize(("owner", "stops", "sent"), [("mmvllm", True, [True]), ("mmvllm", False, []), ("a", True, [])])
def test_only_servers_of_mmvllm_are_asked_to_end_repetitions(folder, owner, stops, sent):
    models = as_json(200, {"data": [{"id": "fake-vl", "owned_by": owner}]})
    with fake_endpoint(lambda *_: said("a a a", finish_reason="repetition"), models) as fake:
        job = caption_images(folder / "000.png", endpoint=fake.url, stop_on_repetition=stops)
        (record,) = job
    assert [body["stop_on_repetition"] for body in fake.bodies if "stop_on_repetition" in body] == sent
    assert record["finish_reason"] == "repetition" and job.progress.num_repetitions == 1


@pytest.mark.network
def test_several_captions_are_one_request(folder):
    choices = [{"message": {"content": text}, "finish_reason": "length"} for text in "abc"]
    with fake_endpoint(lambda body, _: as_json(200, {"choices": choices, "usage": {"completion_tokens": 6}})) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url, n=3, temperature=1.0)
        assert fake.bodies[0]["n"] == 3
        (short,) = caption_images(folder / "000.png", endpoint=fake.url, n=2, temperature=1.0)
    assert [one["caption"] for one in record["captions"]] == ["a", "b", "c"]
    assert (record["completion_tokens"], record["finish_reason"]) == (6, "length")
    assert short["error"] == "the endpoint returned 3 completions, but 2 were requested"


@pytest.mark.network
def test_a_job_that_is_stopped_takes_what_is_in_flight_and_is_resumed(tmp_path):
    folder, out = many(tmp_path / "images", 20), tmp_path / "out.jsonl"
    begun, release = threading.Semaphore(0), threading.Event()

    def answer(body, number):
        begun.release()
        release.wait(20)
        return said("a") if number % 2 else failed(500)  # a try that has failed is not repeated

    with fake_endpoint(answer) as fake:
        job = caption_images(folder, endpoint=EndpointOptions(fake.url, concurrency=4), output=out)

        def stop():
            for _ in range(4):
                begun.acquire()
            job.stop()
            release.set()

        threading.Thread(target=stop).start()
        made = [*job]
        assert [record["caption"] for record in made] == ["a", "a"] and len(fake.bodies) == 4
        fake.answer = lambda body, _: said("b")
        assert len([*caption_images(folder, endpoint=fake.url, output=out)]) == 18
    assert len(records(out)) == 20


@pytest.mark.network
def test_a_server_that_is_lost_ends_the_job_and_its_records_stay(tmp_path):
    folder, out = many(tmp_path / "images", 30), tmp_path / "out.jsonl"
    message = r"the endpoint fails every time, now with: .*HTTP 401, expired"
    answer = lambda body, number: failed(401, "expired") if number > 2 else said("a")  # noqa: E731
    with fake_endpoint(answer) as fake, pytest.raises(JobError, match=message):
        [*caption_images(folder, endpoint=EndpointOptions(fake.url, concurrency=2), output=out)]
    assert 3 < len(records(out)) < 30


@pytest.mark.network
def test_a_video_and_a_damaged_image_are_not_sent(tmp_path):
    (tmp_path / "clip.mp4").write_bytes(b"x")
    (tmp_path / "bad.png").write_bytes(b"x")
    with fake_endpoint(lambda body, _: said("a")) as fake:
        made = {Path(record["path"]).name: record for record in caption_images(tmp_path, endpoint=fake.url)}
    assert "videos are not sent to an endpoint" in made["clip.mp4"]["error"] and made["bad.png"]["error"]
    assert fake.bodies == []


def test_large_images_are_shrunk():
    def sent(image, max_pixels):
        kind, data = data_uri(image, max_pixels).split(";base64,")
        return kind.removeprefix("data:"), Image.open(io.BytesIO(base64.b64decode(data))).size

    assert sent(Image.new("RGB", (600, 500)), 10**6) == ("image/jpeg", (600, 500))
    assert sent(Image.new("RGB", (600, 500)), 30000) == ("image/png", (189, 158))
    assert sent(Image.new("RGB", (4000, 1)), 100) == ("image/png", (632, 1))
    assert sent(Image.new("RGB", (66_000, 20)), 10**8) == ("image/jpeg", (65_500, 19))


@pytest.mark.network
@pytest.mark.parametrize("space", ["\n", "\r\n", " ", "\t", "\u00a0"])
def test_a_key_is_sent_without_the_white_space_around_it(folder, monkeypatch, space):
    monkeypatch.setenv("OPENAI_API_KEY", f"{space}sk-secret-7{space}")
    with fake_endpoint(lambda body, _: said("a")) as fake:
        [*caption_images(folder / "000.png", endpoint=fake.url)]
    assert fake.headers[0]["Authorization"] == "Bearer sk-secret-7"


@pytest.mark.network
def test_white_space_is_no_key(folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", " \n")
    with fake_endpoint(lambda body, _: said("a")) as fake:
        [*caption_images(folder / "000.png", endpoint=fake.url)]
    assert "Authorization" not in fake.headers[0]


@pytest.mark.network
@pytest.mark.parametrize("key", ["sk-\u00e4", "sk-\nsecret", "sk-secret\x7f", "sk-\tsecret", "sk-\u2026", "sk-\x00"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(folder, monkeypatch, capsys, key):
    monkeypatch.setattr("os.environ", os.environ | {"OPENAI_API_KEY": key})  # the real one takes no null character
    with fake_endpoint(lambda body, _: said("a")) as fake:
        assert main(["caption", str(folder), "--endpoint", fake.url]) == 2
    said_text = "".join(capsys.readouterr())
    assert "OPENAI_API_KEY must be a key of printable ASCII characters" in said_text and "sk-" not in said_text
    assert fake.bodies == []


@pytest.mark.network
@pytest.mark.parametrize("status", [400, 401, 429, 500])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_key_that_a_server_repeats_is_in_no_message_or_file(folder, tmp_path, monkeypatch, capsys, status, is_listed):
    monkeypatch.setenv("OPENAI_API_KEY", key := 'sk-sec\\ret/"7')
    login = base64.b64encode(b"user:p@ssword").decode()
    forms = (key, repr(key), json.dumps(key), quote(key, safe=""), "p%40ssword", "p@ssword", login)
    text = " and ".join(forms)
    refusal = failed(status, text)
    with fake_endpoint(lambda body, _: refusal, *([] if is_listed else [refusal])) as fake:
        url = fake.url.replace("//", "//user:p%40ssword@")
        arguments = ["--endpoint", url, "--endpoint-retries", "1", "--output", str(tmp_path / "out.jsonl")]
        code = main(["caption", str(folder), *arguments, "--report", str(tmp_path / "report.html")])
    assert code != 0
    texts = ["".join(capsys.readouterr()), *(path.read_text() for path in tmp_path.glob("*.*") if path.is_file())]
    assert not [text for text in texts if "sk-sec" in text or "ssword" in text or login in text]


@pytest.mark.network
@pytest.mark.parametrize(
    ("models", "model", "message"),
    [
        (failed(401, "bad key"), None, r"endpoint refuses .*HTTP 401, bad key.*OPENAI_API_KEY"),
        (failed(404), None, "endpoint does not list its models; give endpoint_model"),
        (as_json(200, {"data": []}), None, "endpoint does not list its models"),
        (as_json(200, {"data": [{"id": "a"}]}), "b", "endpoint has no model 'b'; it has a"),
        (None, None, "endpoint cannot be reached: Server disconnected"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_before_anything_is_written(folder, tmp_path, models, model, message):
    with fake_endpoint(lambda body, _: said("a"), models) as fake, pytest.raises(ArgumentError, match=message):
        caption_images(folder, endpoint=EndpointOptions(fake.url, model), output=tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.network
def test_a_model_that_is_not_listed_is_taken_where_nothing_is(folder):
    with fake_endpoint(lambda body, _: said("a"), failed(404)) as fake:
        url = f"{fake.url}/v1/chat/completions"
        (record,) = caption_images(folder / "000.png", endpoint=EndpointOptions(url, "my-model"))
    assert record["model"] == "my-model" == fake.bodies[0]["model"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "x"}, "model is for an engine of this machine; leave it out with endpoint"),
        ({"dtype": "bfloat16"}, "dtype is for an engine"),
        ({"quantization": "int8"}, "quantization is for an engine"),
        ({"engine_args": {"tensor_parallel_size": 2}}, "tensor_parallel_size is for an engine"),
        ({"data_parallel_size": 2}, "data_parallel_size is for an engine"),
        ({"worker_processes": True}, "worker_processes is for an engine"),
        ({"min_pixels": 100}, "min_pixels is not sent to a server"),
        ({"allow_special_tokens": True}, "allow_special_tokens is not sent to a server"),
    ],
)
def test_what_only_an_engine_has_is_refused_by_name(folder, given, message):
    with pytest.raises(ArgumentError, match=message):
        caption_images(folder, endpoint="http://127.0.0.1:9", **given)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "", "http://"])
def test_a_wrong_url(folder, url):
    with pytest.raises(ArgumentError, match="endpoint must be an http"):
        caption_images(folder, endpoint=url)


@pytest.mark.network
def test_the_command(folder, out, capsys):
    with fake_endpoint(lambda body, _: said("a dog")) as fake:
        command = ["caption", str(folder), "--endpoint", fake.url, "--endpoint-model", "other", "--concurrency", "2"]
        assert main([*command, "--output", str(out), "--endpoint-timeout", "9", "--endpoint-retries", "0"]) == 0
    assert {record["caption"] for record in records(out)} == {"a dog"} and len(records(out)) == 4
    assert {body["model"] for body in fake.bodies} == {"other"}
    assert "bundled demonstration model" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "x"], "--model is for an engine of this machine; leave it out with --endpoint"),
        (["--device", "cpu"], "--device is for an engine"),
        (["--dtype", "float32"], "--dtype is for an engine"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size is for an engine"),
        (["--data-parallel-size", "auto"], "--data-parallel-size is for an engine"),
        (["--worker-processes"], "--worker-processes is for an engine"),
        (["--executor", "ray"], "--executor ray makes engines itself"),
        (["--min-pixels", "9"], "--min-pixels is not sent to a server"),
    ],
)
def test_the_command_refuses_options_of_engines(folder, capsys, options, message):
    assert main(["caption", str(folder), "--endpoint", "http://127.0.0.1:9", *options]) == 2
    assert message in capsys.readouterr().err


def test_options_that_need_an_endpoint(folder, capsys):
    assert main(["caption", str(folder), "--concurrency", "2", "--endpoint-model", "a"]) == 2
    assert "--endpoint-model, --concurrency needs --endpoint" in capsys.readouterr().err
