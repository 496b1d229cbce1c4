"""`response_format`, `structured_outputs` and vLLM's `guided_*` fields: what comes back, and what is refused."""

import json
from typing import Literal

import jsonschema
import pytest
from pydantic import BaseModel

from tests.helpers.serving.schemas import doubling, wide
from tests.helpers.serving.server import CHAT, COMPLETIONS, answered, call, chat, completion
from tests.server.refusals import check_refusal, refusal

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "scene", "strict": True, "schema": SCHEMA}}
JSON_FIELDS = [
    {"response_format": FORMAT},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": "", "guided_decoding_backend": "auto"},
]
OTHER_FIELDS = [
    ({"structured_outputs": {"choice": ["red", "blue"]}}, ("red", "blue")),
    ({"guided_choice": ["red", "blue"]}, ("red", "blue")),
    ({"guided_regex": "(ab){2}"}, ("abab",)),
    ({"guided_grammar": 'start: "x" y\ny: "1" | "2"'}, ("x1", "x2")),
]


def choice_of(app, body: dict, path: str = CHAT) -> dict:
    return answered(app, path, body)["choices"][0]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("fields", JSON_FIELDS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_completion_is_json_of_the_schema(app, path, fields):
    body = chat("Which colour?", **fields) if path == CHAT else completion(max_tokens=60, **fields)
    choice = choice_of(app, body | {"temperature": 1, "seed": 3}, path)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"] if path == CHAT else choice["text"]), SCHEMA)


def test_any_white_space_can_be_disabled(app):
    for name, length in (("disable_any_whitespace", True), ("whitespace_pattern", "")):
        fields = {"structured_outputs": {"json": SCHEMA, name: length}}
        text = choice_of(app, chat("Which colour?", **fields, temperature=2, seed=3))["message"]["content"]
        assert " " not in text and "\n" not in text and json.loads(text)


@pytest.mark.parametrize("fields, texts", OTHER_FIELDS)
def test_a_completion_is_what_vllms_fields_say(app, fields, texts):
    choice = choice_of(app, chat("Which?", **fields))
    assert choice["message"]["content"] in texts and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{"response_format": {"type": "json_object"}}, {"guided_json_object": True}])
def test_any_object(app, fields):
    choice = choice_of(app, chat("Which?", **fields, temperature=1, seed=1, max_tokens=400))
    text = choice["message"]["content"]
    assert text.startswith("{") and (choice["finish_reason"] == "length" or isinstance(json.loads(text), dict))


def test_a_completion_cut_by_its_length_says_so(app):
    assert choice_of(app, chat("Which?", **JSON_FIELDS[0], max_tokens=3))["finish_reason"] == "length"


class Scene(BaseModel):
    """What a client asks for."""

    colour: Literal["red", "blue"]
    count: Literal[1, 2, 3] | None


@pytest.mark.spawns
def test_the_openai_client_streams_a_pydantic_model(running):
    body = chat("Which colour?", max_tokens=200, temperature=1, seed=5)
    with running.client() as client, client.chat.completions.stream(**body, response_format=Scene) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds and isinstance(final.choices[0].message.parsed, Scene)


REFUSED = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs json_schema"),
    (
        {"response_format": {"type": "json_object", "json_schema": FORMAT["json_schema"]}},
        *("response_format.json_schema", "not take"),
    ),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "must be 'text', 'json_object' or 'json_schema'"),
    ({"guided_json": {}}, "guided_json", "not empty"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "'uniqueItems' at /"),
    ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
    ({"guided_choice": []}, "guided_choice", "at least 1 item"),
    ({"guided_choice": ["a"] * 2 + ["b" * 65536]}, "guided_choice", "at most 65536"),
    ({"structured_outputs": {}}, "structured_outputs", "structured_outputs is empty; give exactly one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "has regex and choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
    ({"guided_regex": "a", "guided_json": {"type": "null"}}, "guided_json", "has json and regex"),
    ({"guided_regex": "a", "response_format": FORMAT}, "guided_regex", "response_format and guided_regex both say"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "got regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "contradicts"),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens", "contradicts"),
]


@pytest.mark.parametrize("fields, param, message", REFUSED)
def test_what_cannot_be_enforced_is_refused_with_its_field(app, fields, param, message):
    for path, body in ((CHAT, chat("Hi", **fields)), (COMPLETIONS, completion(**fields))):
        check_refusal(app, path, body, param, message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("guided_choice", [f"{i} {'x' * 20}" for i in range(9000)], "must have at most 65536 characters, got"),
        ("guided_json", {"const": "x" * 60_000}, "cannot be enforced"),
        ("guided_regex", ".*" * 200, "cannot be enforced"),
        *(("guided_grammar", grammar, "items") for grammar in ('start: "a"{1000000}', wide(), doubling())),
    ],
)
def test_a_restriction_that_takes_too_much_is_the_clients_error(field, value, message, app):
    for _ in range(2):  # the second time the reason is known
        error = refusal(app, CHAT, chat("Which?", **{field: value}))
        assert error["param"] == field and message in error["message"] and len(error["message"]) < 500
    assert call(app, "GET", "/health").json()["status"] == "ok"


def test_tokens_that_are_all_forbidden_are_the_clients_error(app):
    body = completion(allowed_token_ids=[5], no_repeat_ngram_size=1, max_tokens=9)
    assert refusal(app, COMPLETIONS, body)["message"] == "no token can follow: every token is forbidden"
    assert call(app, "GET", "/health").json()["status"] == "ok"
