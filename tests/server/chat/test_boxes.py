"""Boxes in responses of the server, and choices that are ended because they repeat themselves."""

import io

import pytest
from PIL import Image

from tests.helpers.engine.requests import noise_image
from tests.helpers.engine.scripted import script
from tests.helpers.serving.server import CHAT, COMPLETIONS, answered, chat, completion, data_uri, image_part
from tests.server.refusals import refusal

ANSWER = (
    "<|object_ref_start|>it<|object_ref_end|><|box_start|>(100,200),(500,750)<|box_end|>"
    " and <|box_start|>(0,1000)<|box_end|>"
)
UPRIGHT = [
    {"label": "it", "image": 0, "box": [6.0, 18.0, 30.0, 67.5]},
    {"label": None, "image": 0, "point": [0.0, 90.0]},
]
STORED = [
    {"label": "it", "image": 0, "box": [18.0, 30.0, 67.5, 54.0]},
    {"label": None, "image": 0, "point": [90.0, 60.0]},
]


@pytest.fixture
def question(running, monkeypatch) -> dict:
    """A chat about an image that is stored as 90x60 pixels, whose answer is ANSWER."""
    script(monkeypatch, running.engine.tokenizer, ANSWER)
    exif = Image.Exif()
    exif[0x0112] = 6
    noise_image(90, 60).save(buffer := io.BytesIO(), "PNG", exif=exif)
    return chat(image_part(data_uri(buffer.getvalue())), "Where?", max_tokens=200)


@pytest.mark.spawns
@pytest.mark.parametrize(("boxes", "expected"), [(True, UPRIGHT), ("stored", STORED)])
def test_each_choice_has_its_boxes_if_the_request_asks_for_them(boxes, expected, running, question):
    extra = {"mmvllm": {"boxes": boxes}}
    with running.client() as client:
        whole = client.chat.completions.create(**question, n=2, extra_body=extra)
        assert [choice.mmvllm for choice in whole.choices] == [{"boxes": expected}] * 2
        assert whole.choices[0].message.content == "it(100,200),(500,750) and (0,1000)"
        chunks = list(client.chat.completions.create(**question, n=2, stream=True, extra_body=extra))
    found = {choice.index: choice.mmvllm for chunk in chunks for choice in chunk.choices if hasattr(choice, "mmvllm")}
    assert found == {0: {"boxes": expected}, 1: {"boxes": expected}}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        assert hasattr(choice, "mmvllm") == (choice.finish_reason is not None)


@pytest.mark.spawns
@pytest.mark.parametrize("extra", [{}, {"mmvllm": None}, {"mmvllm": {}}, {"mmvllm": {"boxes": False}}])
def test_other_responses_have_no_field_of_this_name(extra, app, question):
    made = answered(app, CHAT, question | extra)
    assert made["choices"][0].keys() == {"index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids"}


def test_no_boxes_are_an_empty_list(app):
    body = chat("Hi", max_tokens=2) | {"mmvllm": {"boxes": True}}
    assert answered(app, CHAT, body)["choices"][0]["mmvllm"] == {"boxes": []}


@pytest.mark.parametrize("extra", [{"boxes": "all"}, {"points": True}, True])
def test_other_extras_are_refused_by_name(extra, app, question):
    assert refusal(app, CHAT, question | {"mmvllm": extra})["param"].startswith("mmvllm")


@pytest.mark.slow
def test_choices_that_repeat_themselves_are_ended(app):
    body = completion(max_tokens=300, temperature=0, frequency_penalty=-2, ignore_eos=True)
    whole, ended = (answered(app, COMPLETIONS, body | {"stop_on_repetition": stops}) for stops in (False, True))
    assert [one["choices"][0]["finish_reason"] for one in (whole, ended)] == ["length", "repetition"]
    assert whole["choices"][0]["text"].startswith(ended["choices"][0]["text"])
    assert 64 <= ended["usage"]["completion_tokens"] < 300
