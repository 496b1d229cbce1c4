"""Bodies that would take long to parse or to answer, or whose response would be as large as the request."""

import time

import pytest

from mmvllm.server.protocol import MAX_PARTS
from tests.helpers.server import CHAT, call, chat, error_of, user

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "body",
    [
        chat("Hello", **{"x" * 2**20: 1}),
        chat("Hello") | {"messages": [user("Hello") | {"\u00e9" * 2**20: 1}]},
        chat({"type": "x" * 2**20}),
        chat("Hello", **{f"key {i}": 1 for i in range(900)}),
        chat("Hello") | {"model": "x" * 2**20},
    ],
    ids=["key", "key of a message", "type", "many keys", "model"],
)
def test_an_error_is_small_even_if_what_is_wrong_is_not(app, body):
    answer = call(app, "POST", CHAT, json=body)
    assert answer.status_code in (400, 404) and len(answer.content) < 2000
    error_of(answer)


def test_long_integers_are_refused_before_they_are_parsed(app):
    numbers = ",".join(["9" * 4000] * 3000)
    start = time.perf_counter()
    answer = call(app, "POST", CHAT, content=f'{{"metadata": [{numbers}]}}', headers=JSON)
    assert time.perf_counter() - start < 1.0  # parsing them all takes 2.5 s
    assert answer.status_code == 400 and "an integer has 4000 digits, at most 500" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "messages",
    [[user("Hi")] * (MAX_PARTS // 2 + 1), [user(*["Hi"] * MAX_PARTS)], [{"role": "user", "content": ""}] * 40_000],
)
def test_too_many_parts_are_refused_before_they_are_validated(app, messages):
    start = time.perf_counter()
    answer = call(app, "POST", CHAT, json=chat("Hi") | {"messages": messages})
    assert time.perf_counter() - start < 1.0
    assert answer.status_code == 400 and error_of(answer)["param"] == "messages"
    assert f"at most {MAX_PARTS} are accepted" in error_of(answer)["message"]


def test_as_many_parts_as_are_allowed_are_accepted(app):
    body = chat(*[""] * (MAX_PARTS - 1), max_tokens=1)
    assert call(app, "POST", CHAT, json=body).status_code == 200
