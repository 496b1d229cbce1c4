"""Responses that are kept: conversations that go on with an id, log-probabilities, and what leaves the memory."""

import openai
import pytest

from mmvllm.server import response_store
from mmvllm.server.response_store import ResponseStore
from tests.helpers.server import CHAT, call, chat, data_uri, error_of, image_part, make_app, user

PATH = "/v1/responses"
INCLUDE = ["message.output_text.logprobs"]
TOOL = {"type": "function", "name": "count", "parameters": {"type": "object", "properties": {"most": {"enum": [1, 2]}}}}


@pytest.fixture(scope="module")
def engine(engine_without_limit):
    return engine_without_limit


def create(client, given="Hello", **keys):
    asked = {"model": "bundled", "input": given, "temperature": 0, "max_output_tokens": 12}
    return client.responses.create(**asked | keys)


def post(app, **body) -> dict:
    answer = call(app, "POST", PATH, json={"temperature": 0, "max_output_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(app, *messages: dict) -> str:
    answer = call(app, "POST", CHAT, json=chat(messages=[*messages], max_tokens=12))
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.network
@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_goes_on_with_the_id_of_a_response(app, client, streams):
    parts = [{"type": "input_image", "image_url": data_uri()}, {"type": "input_text", "text": "What is this?"}]
    first = create(client, [user(*parts)], instructions="Be brief.")
    second = create(client, "And now?", previous_response_id=first.id, stream=streams)
    second = [*second][-1].response if streams else second
    third = create(client, "Why?", previous_response_id=second.id)
    turns = [user(image_part(data_uri()), "What is this?"), {"role": "assistant", "content": first.output_text}]
    turns += [user("And now?"), {"role": "assistant", "content": second.output_text}, user("Why?")]
    assert (second.output_text, third.output_text) == (text_of(app, *turns[:3]), text_of(app, *turns))
    assert second.previous_response_id == first.id and first.store and second.store
    other = create(client, "Where?", previous_response_id=first.id)  # from where it was then
    assert other.output_text == text_of(app, *turns[:2], user("Where?"))


@pytest.mark.network
def test_a_result_goes_on_with_the_call(app, client):
    keys = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "count"}, "max_output_tokens": 100}
    [called] = (first := create(client, "How many?", **keys)).output
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "3"}
    made = create(client, [result], previous_response_id=first.id, tools=[TOOL])
    whole = create(client, [user("How many?"), called.model_dump(), result], tools=[TOOL])
    referred = create(client, [user("How many?"), {"type": "item_reference", "id": called.id}, result], tools=[TOOL])
    assert made.output_text == whole.output_text == referred.output_text


@pytest.mark.network
def test_a_response_can_be_read_and_deleted(client):
    made = create(client, metadata={"a": "b"})
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="was not stored, or it has left the memory"):
            ask(made.id)
    with pytest.raises(openai.BadRequestError) as raised:
        create(client, previous_response_id=made.id)
    assert raised.value.code == "previous_response_not_found"


def test_a_response_that_is_not_to_be_stored_is_not(app, engine):
    for one, keys in ((app, {"store": False}), (make_app(engine, max_stored_bytes=0), {})):
        made = post(one, input="Hi", **keys)
        assert made["store"] is False
        assert call(one, "GET", f"{PATH}/{made['id']}").status_code == 404


def test_old_responses_leave_where_they_are_too_many(engine):
    app = make_app(engine, max_stored_bytes=8000)
    made = [post(app, input="x" * 400)["id"] for _ in range(10)]
    there = [call(app, "GET", f"{PATH}/{one}").is_success for one in made]
    assert there == sorted(there) and 1 < sum(there) < 10


def response(number: int) -> dict:
    part = {"type": "output_text", "text": "a" * 1000}
    return {
        "id": f"resp_{number}",
        "output": [{"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}],
    }


def test_what_is_kept_has_a_size_and_a_time(monkeypatch):
    now = 0.0
    monkeypatch.setattr(response_store.time, "monotonic", lambda: now)
    store = ResponseStore(5000, 60)
    store.add(response(0), [], None)
    store.add(response(1), [], store.get("resp_0"))
    now = 50.0
    assert len(store.get("resp_1").items()) == 2 and store.output_item("msg_1").role == "assistant"
    now = 100.0  # resp_1 was used 50 seconds ago
    assert store.get("resp_0") is None and store.output_item("msg_0") is None and store.get("resp_1")
    store.add(response(2), [], store.get("resp_1"))  # with three messages: together they are too large
    assert store.get("resp_1") is None and len(store.get("resp_2").items()) == 3
    store.add(response(3), [], store.get("resp_2"))
    store.add(response(4), [], None)
    assert store.get("resp_3") is None and store.get("resp_4") is not None
    now = 161.0
    assert store.get("resp_4") is None and not store.remove("resp_4") and store._num_bytes == 0


@pytest.mark.network
@pytest.mark.parametrize("keys", [{"include": INCLUDE}, {"top_logprobs": 3}, {"include": INCLUDE, "top_logprobs": 3}])
def test_log_probabilities_are_those_of_a_chat(app, client, keys):
    asked = chat("Hello", max_tokens=12, logprobs=True, top_logprobs=keys.get("top_logprobs", 0))
    want = call(app, "POST", CHAT, json=asked).json()["choices"][0]["logprobs"]["content"]
    whole = create(client, **keys)
    events = [*create(client, stream=True, **keys)]
    for response in (whole, events[-1].response):
        assert [one.model_dump() for one in response.output[0].content[0].logprobs] == want
        assert response.top_logprobs == keys.get("top_logprobs", 0)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == [one["token"] for one in want][: len(deltas)]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [one.token for one in done.logprobs] == [one["token"] for one in want]


def test_a_response_has_a_limited_number_of_log_probabilities(app, monkeypatch):
    monkeypatch.setattr("mmvllm.server.response_builder.MAX_LOGPROBS_OF_RESPONSE", 10)
    body = {"input": "Hi", "top_logprobs": 5, "max_output_tokens": 4, "ignore_eos": True}
    answer = call(app, "POST", PATH, json=body)
    assert answer.status_code == 400 and error_of(answer)["param"] == "top_logprobs"
    assert "lower top_logprobs, or max_output_tokens" in answer.text
