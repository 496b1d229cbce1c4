"""Endpoints that refuse a field, report errors in other forms or within a success, or have a query in their URL."""

import logging
from pathlib import Path

import pytest

from mmvllm.captioning import EndpointOptions, caption_images
from mmvllm.errors import ArgumentError
from tests.helpers.captioning.command import many
from tests.helpers.serving.endpoints import Answer, as_json, fake_endpoint, said

pytestmark = [pytest.mark.network, pytest.mark.usefixtures("quick_retries")]


@pytest.fixture
def folder(tmp_path) -> Path:
    return many(tmp_path / "images", 4)


def openai(field: str, code: str = "unsupported_parameter") -> dict:
    message = f"Unsupported parameter: '{field}' is not supported with this model."
    return {"error": {"message": message, "type": "invalid_request_error", "param": field, "code": code}}


REFUSALS = {
    "OpenAI": openai,
    "OpenAI, by text": lambda field: {"error": {"message": f"Unrecognized request argument supplied: {field}"}},
    "a value": lambda field: openai(field, "unsupported_value"),
    "FastAPI": lambda field: {
        "detail": [{"type": "extra_forbidden", "loc": ["body", field], "msg": "Extra inputs are not permitted"}]
    },
    "Google": lambda field: [
        {"error": {"code": 400, "message": f'Unknown name "{field}": Cannot find field.', "status": "INVALID_ARGUMENT"}}
    ],
    "a text": lambda field: {"error": f"property '{field}' is unsupported"},
    "a message": lambda field: {"object": "error", "message": f"{field}: Extra inputs are not permitted", "code": 400},
    "problem details": lambda field: {"title": "Bad Request", "detail": f"unexpected field {field}", "status": 422},
}


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("form", REFUSALS)
def test_a_field_that_is_refused_is_left_out(form, status, folder, caplog):
    """For the whole job; `max_tokens` is sent under its newer name first, if it is not refused as well."""
    refused = {"max_tokens", "temperature", "seed"}

    def respond(body: dict, _: int) -> Answer:
        field = next((name for name in body if name in refused), None)
        return said("a star") if field is None else as_json(status, REFUSALS[form](field))

    with fake_endpoint(respond) as fake, caplog.at_level(logging.WARNING):
        options = EndpointOptions(fake.url, concurrency=1)
        made = list(caption_images(folder, endpoint=options, max_tokens=9, seed=1, temperature=0.5))
    assert [record["error"] for record in made] == [None] * 4
    assert len(fake.bodies) == 4 + 3 and all(body["max_completion_tokens"] == 9 for body in fake.bodies[3:])
    assert not refused & fake.bodies[-1].keys()
    told = [record.message for record in caplog.records if "the endpoint refuses" in record.message]
    assert sorted(text.split(":")[0] for text in told) == [
        "the endpoint refuses max_tokens; it is sent as max_completion_tokens",
        "the endpoint refuses seed; it is left out",
        "the endpoint refuses temperature; it is left out",
    ]


def test_both_names_of_a_field_may_be_refused(folder):
    def respond(body: dict, _: int) -> Answer:
        field = next((name for name in ("max_tokens", "max_completion_tokens") if name in body), None)
        return said("a star") if field is None else as_json(400, openai(field))

    with fake_endpoint(respond) as fake:
        made = list(caption_images(folder, endpoint=fake.url, max_tokens=9))
    assert [record["error"] for record in made] == [None] * 4


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (openai("messages"), "Unsupported parameter: 'messages' is not supported with this model."),
        (
            {"error": {"message": "max_tokens is above the limit of 5", "param": "max_tokens"}},
            "max_tokens is above the",
        ),
        ({"error": {"message": "temperature is unsupported"}, "code": 400}, "temperature is unsupported"),
    ],
)
def test_other_refusals_are_errors(body, reason, folder):
    """The last one is about a field that is not sent any more."""
    with fake_endpoint(lambda *_: as_json(400, body)) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url)
    assert record["error"].startswith(f"the endpoint refuses the request: HTTP 400, {reason}")
    assert len(fake.bodies) <= 2


FORMS = [
    {"error": {"message": "no more credit", "code": 402}},
    {"error": "no more credit"},
    {"errors": [{"message": "no more credit"}]},
    [{"error": {"message": "no more credit", "status": "X"}}],
    {"detail": "no more credit"},
    {"detail": [{"loc": ["body"], "msg": "no more credit"}]},
    {"message": "no more credit"},
    {"title": "no more credit"},
    {"error": {"error": {"message": "no more credit"}}},
]


@pytest.mark.parametrize("body", FORMS)
def test_the_reason_is_in_the_record_at_any_status(body, folder):
    for status, told in ((403, "HTTP 403, no more credit"), (200, "no more credit")):
        with fake_endpoint(lambda *_, status=status: as_json(status, body)) as fake:
            (record,) = caption_images(folder / "000.png", endpoint=fake.url)
        assert record["error"] == f"the endpoint refuses the request: {told}"
        assert len(fake.bodies) == 1


@pytest.mark.parametrize("code", [429, "429", 503])
def test_an_error_in_a_success_is_tried_again_if_that_may_help(code, folder):
    busy = as_json(200, {"error": {"message": "rate-limited", "code": code}})
    with fake_endpoint(lambda _, number: busy if number < 2 else said("a star")) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=fake.url)
    assert record["caption"] == "a star" and len(fake.bodies) == 3
    with fake_endpoint(lambda *_: busy) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=EndpointOptions(fake.url, max_retries=1))
    assert record["error"] == "the endpoint failed (2 times): rate-limited"


@pytest.mark.parametrize("body", [{}, [], {"error": None}, {"error": {}}, [[[[[["deep"]]]]]], 5])
def test_an_answer_that_is_neither_is_tried_again(body, folder):
    with fake_endpoint(lambda *_: as_json(200, body)) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=EndpointOptions(fake.url, max_retries=1))
    assert record["error"] == "the endpoint failed (2 times): its answer is not a chat completion"


def test_the_query_of_the_url_is_sent_and_its_secrets_are_hidden(folder):
    query = "api-version=2026-10-21&subscription-key=very+secret+key"
    with fake_endpoint(lambda *_: as_json(400, {"error": "very secret key is wrong on 2026-10-21"})) as fake:
        (record,) = caption_images(folder / "000.png", endpoint=f"{fake.url}/v1?{query}")
    assert record["error"] == "the endpoint refuses the request: HTTP 400, *** is wrong on 2026-10-21"
    assert fake.paths == [
        f"/v1/models?{query}",
        f"/v1/chat/completions?{query}",
    ]


def test_a_refused_list_of_models_says_why(folder):
    with (
        fake_endpoint(lambda *_: said("a"), as_json(401, {"detail": "no such key"})) as fake,
        pytest.raises(ArgumentError, match=r"refuses the request \(HTTP 401, no such key\)"),
    ):
        caption_images(folder, endpoint=fake.url)
