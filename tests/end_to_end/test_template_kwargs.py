"""Arguments of the chat template, wherever requests come from; the bundled model, whose template can number images."""

import asyncio
import json
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from mmvllm import LLM, AsyncLLM, RequestError, SamplingParams
from mmvllm.captioning import CaptionSettings, caption_images
from mmvllm.cli.main import main
from mmvllm.demo.conversation import Options, Turn
from mmvllm.demo.images import UploadedImage
from mmvllm.demo.session import Sessions
from mmvllm.demo.settings import DemoSettings
from mmvllm.processors.videos.load import DIRECT
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.serving.pages import elsewhere
from tests.helpers.serving.server import CHAT, ENGINE, call, chat, data_uri, error_of, image_part, make_app, png

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
NUMBERED = {"add_vision_id": True}
QUESTION = ask(noise_image(60, 60), "What is this?")


@pytest.fixture(scope="module")
def llm():
    with LLM(**ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine():
    engine = AsyncLLM(**ENGINE)
    yield engine
    asyncio.run(engine.shutdown(drain=False))


@pytest.fixture
def numbered(llm, engine, monkeypatch):
    """Whether the template has numbered the image, for each prompt that an engine is given."""
    found = []
    for inner in (llm.engine, engine._engine):

        def add(prompt, *args, add=inner.add, **keys):
            found.append(" 1: <|vision_start|>" in llm.tokenizer.decode(prompt.token_ids))
            return add(prompt, *args, **keys)

        monkeypatch.setattr(inner, "add", add)
    return found


GIVEN = pytest.mark.parametrize(("kwargs", "want"), [(NUMBERED, True), (None, False), ({}, False)])


@GIVEN
def test_requests_from_python(kwargs, want, llm, engine, numbered):
    request = {**QUESTION, "chat_template_kwargs": kwargs}
    llm.generate_multimodal([request], SHORT, use_tqdm=False)
    llm.chat(QUESTION["messages"], SHORT, use_tqdm=False, chat_template_kwargs=kwargs)
    assert [*llm.stream_multimodal(iter([request]), SHORT, stream=True)]
    llm.add_request(request, SHORT)
    while not llm.engine.is_finished():
        llm.step()

    async def answer() -> None:
        async for _ in engine.generate(request, SHORT):
            pass

    asyncio.run(answer())
    assert numbered == [want] * 5


def test_one_bad_request_leaves_the_others_alone(llm, numbered):
    bad = {**QUESTION, "chat_template_kwargs": {"tools": []}}
    failed, answered = llm.generate_multimodal([bad, QUESTION], SHORT, use_tqdm=False, on_error="return")
    assert "may not have 'tools'" in failed.error and answered.error is None and numbered == [False]
    with pytest.raises(RequestError, match="request 0: chat_template_kwargs may not have 'messages'"):
        llm.chat(QUESTION["messages"], SHORT, use_tqdm=False, chat_template_kwargs={"messages": []})


BODY = chat(image_part(data_uri(png(60, 60))), "What is this?", max_tokens=2)


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("default", "given", "want"),
    [
        ({}, None, False),
        ({}, NUMBERED, True),
        (NUMBERED, None, True),
        (NUMBERED, {}, True),
        (NUMBERED, {"enable_thinking": False}, True),
        (NUMBERED, {"add_vision_id": False}, False),
        (NUMBERED, {"add_vision_id": None}, False),
    ],
)
def test_what_a_request_gives_the_server_comes_before_the_servers_own(default, given, want, engine, numbered):
    app = make_app(engine, chat_template_kwargs=default)
    response = call(app, "POST", CHAT, json=BODY | {"chat_template_kwargs": given})
    assert response.status_code == 200, response.text
    assert numbered == [want]


@pytest.mark.spawns
def test_the_server_names_the_field_of_an_error(engine):
    response = call(make_app(engine), "POST", CHAT, json=BODY | {"chat_template_kwargs": {"namespace": 5}})
    assert response.status_code == 400 and "the chat template cannot render" in error_of(response)["message"]
    schema = call(make_app(engine), "GET", "/openapi.json").json()["components"]["schemas"]["ChatRequest"]
    assert "enable_thinking" in schema["properties"]["chat_template_kwargs"]["description"]


@pytest.mark.spawns
@pytest.mark.parametrize("kwargs", [NUMBERED, {}])
def test_the_page_gives_its_own(kwargs, engine, numbered, tmp_path):
    async def converse() -> None:
        uploads = SimpleNamespace(release=lambda *_, **__: None)
        sessions = Sessions(engine, uploads, DemoSettings(chat_template_kwargs=kwargs))
        noise_image(60, 60).save(tmp_path / "a.png")
        image = UploadedImage.read(tmp_path / "a.png", DIRECT)
        options = Options("", 0, 1, 0, 1, 2, -1, 3136, 20_000)
        async with aclosing(sessions.answer(sessions.get("one"), Turn("What?", (image,)), options)) as ticks:
            async for _ in ticks:
                pass

    elsewhere(converse())
    assert numbered == [bool(kwargs)]


@pytest.mark.spawns
@pytest.mark.thinned(1)
@GIVEN
def test_captions(kwargs, want, llm, numbered, tmp_path):
    noise_image(60, 60).save(tmp_path / "a.png")
    for in_processes in (False, True):
        keys = {"llm": llm, "max_tokens": 2, "worker_processes": in_processes, "chat_template_kwargs": kwargs}
        assert [record["error"] for record in caption_images(tmp_path / "a.png", **keys)] == [None]
    assert numbered == [want] * 2


def test_settings_of_captions():
    plain, other = CaptionSettings(), CaptionSettings(chat_template_kwargs={"b": [1], "a": {"c": None}})
    assert plain.fingerprint == CaptionSettings(chat_template_kwargs={}).fingerprint
    assert other.fingerprint not in (plain.fingerprint, CaptionSettings(chat_template_kwargs={"b": [2]}).fingerprint)
    assert other == CaptionSettings(chat_template_kwargs={"a": {"c": None}, "b": [1]})
    assert hash(other) == hash(CaptionSettings(chat_template_kwargs={"a": {"c": None}, "b": [1]}))
    assert other.difference({"chat_template_kwargs": json.loads('{"a": {"c": null}, "b": [1]}')}) == []
    with pytest.raises(ValueError, match="chat_template_kwargs may not have 'tokenize'"):
        CaptionSettings(chat_template_kwargs={"tokenize": True})


def test_an_output_has_one_choice(tmp_path, capsys):
    noise_image(60, 60).save(tmp_path / "a.png")
    command = ["caption", str(tmp_path / "a.png"), "--output", str(tmp_path / "o.jsonl"), "--max-tokens", "2"]
    command += ["--device", "cpu"]
    assert main([*command, "--chat-template-kwargs", '{"add_vision_id": true}']) == 0
    assert main([*command, "--default-chat-template-kwargs", '{"add_vision_id": true}']) == 0
    assert main(command) == 2
    assert "chat_template_kwargs was {'add_vision_id': True}, is None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "'{' is not JSON"),
        ("[1]", "must be a dict of names and JSON values, got list"),
        ('{"tools": []}', "may not have 'tools'"),
        ('{"a": NaN}', "has 'a' with nan, which is not a JSON value"),
        ("[" * 5000, "is not JSON"),
        ('{"a": ' + "1" * 5000 + "}", "is not JSON"),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["demo"], ["caption", "x.png"]], ids=" ".join)
def test_a_wrong_option_is_refused_in_one_line(command, text, message, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command, "--chat-template-kwargs", text])
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and len(err.splitlines()) == 2
