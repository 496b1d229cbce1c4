"""Responses that are kept: conversations that go on with an id, log-probabilities, and what leaves the memory."""

import functools
import json
import time

import openai
import pytest

from mmvllm.server.responses import store as store_module
from mmvllm.server.responses.as_chat import messages_of
from mmvllm.server.responses.protocol import ITEMS
from mmvllm.server.responses.store import ResponseStore
from tests.helpers.serving.server import CHAT, RESPONSES, answered, call, chat, data_uri, image_part, make_app, user
from tests.server.refusals import check_refusal, refusal

INCLUDE = ["message.output_text.logprobs"]
TOOL = {"type": "function", "name": "count", "parameters": {"type": "object", "properties": {"most": {"enum": [1, 2]}}}}


@pytest.fixture(scope="module")
def engine(engine_without_limit):
    return engine_without_limit


def create(client, given="Hello", **keys):
    asked = {"model": "bundled", "input": given, "temperature": 0, "max_output_tokens": 12}
    return client.responses.create(**asked | keys)


def post(app, **body) -> dict:
    return answered(app, RESPONSES, {"temperature": 0, "max_output_tokens": 4, **body})


def text_of(app, *messages: dict) -> str:
    return answered(app, CHAT, chat(messages=[*messages], max_tokens=12))["choices"][0]["message"]["content"]


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
def test_the_input_of_a_response_can_be_read(client):
    parts = [{"type": "input_image", "image_url": data_uri()}, {"type": "input_text", "text": "How many?"}]
    keys = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "count"}, "max_output_tokens": 100}
    first = create(client, [user("Hi"), {"role": "assistant", "content": "Yes?"}, user(*parts)], **keys)
    items = client.responses.input_items.list(first.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert (items[1].content[0].type, items[1].content[0].text) == ("output_text", "Yes?")
    assert items[2].content[0].image_url == data_uri() and items[2].content[1].text == "How many?"
    assert [item.id for item in client.responses.input_items.list(first.id, limit=1)] == [one.id for one in items[::-1]]
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "3"}
    second = create(client, [result, user("And now?")], previous_response_id=first.id, tools=[TOOL])
    answer, question = client.responses.input_items.list(second.id, order="asc").data
    assert (answer.type, answer.call_id, answer.output) == (result["type"], result["call_id"], "3")
    assert question.content[0].text == "And now?" and create(client, [user("Hi"), items[1]]).output_text
    alone = create(client, [{"type": "reasoning", "summary": []}], previous_response_id=first.id)
    assert client.responses.input_items.list(alone.id).data == []
    called = {"type": "function_call", "call_id": "b", "name": "count", "arguments": "{}"}
    merged = create(client, [called, result | {"call_id": "b"}], previous_response_id=first.id, tools=[TOOL])
    kinds = [item.type for item in client.responses.input_items.list(merged.id, order="asc").data]
    assert kinds == ["function_call", "function_call_output"]  # and not the call before it
    page = client.responses.input_items.list(second.id, limit=1, after=question.id)
    assert page.data == [answer] and not page.has_more
    with pytest.raises(openai.BadRequestError, match="after is 'x', which is not the id of an item"):
        client.responses.input_items.list(second.id, after="x")
    with pytest.raises(openai.BadRequestError, match="limit: Input should be less than or equal to 100") as raised:
        client.responses.input_items.list(second.id, limit=101)
    assert raised.value.param == "limit"
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_x")


def test_the_bytes_of_an_input_that_is_read_count_with_those_of_requests(engine):
    for limit, status in ((1000, 429), (20_000, 200)):
        app = make_app(engine, max_bodies_bytes=limit)
        path = f"{RESPONSES}/{post(app, input='Hi', max_output_tokens=200, ignore_eos=True)['id']}"
        for one in (f"{path}/input_items", path):
            assert call(app, "GET", one).status_code == status


@pytest.mark.network
def test_a_response_can_be_read_and_deleted(client):
    made = create(client, metadata={"a": "b"})
    assert client.responses.retrieve(made.id) == made
    with pytest.raises(openai.BadRequestError, match="stream is not supported here"):
        client.responses.retrieve(made.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="is complete and cannot be cancelled; DELETE removes it"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="was not stored, or it has expired or was evicted"):
            ask(made.id)
    with pytest.raises(openai.BadRequestError) as raised:
        create(client, previous_response_id=made.id)
    assert raised.value.code == "previous_response_not_found"


@pytest.mark.parametrize("limit", [0, 3000])
def test_a_response_that_is_not_stored_says_so(app, engine, limit):
    for one, keys in ((app, {"store": False}), (make_app(engine, max_stored_bytes=limit), {"input": "x" * 700})):
        made = post(one, **{"input": "Hi", **keys})
        assert made["store"] is False
        assert call(one, "GET", f"{RESPONSES}/{made['id']}").status_code == 404


def test_old_responses_are_evicted_where_they_are_too_large_together(engine):
    app = make_app(engine, max_stored_bytes=16000)
    made = [post(app, input="x" * 400)["id"] for _ in range(10)]
    there = [call(app, "GET", f"{RESPONSES}/{one}").is_success for one in made]
    assert there == sorted(there) and 1 < sum(there) < 10


def response(number: int) -> dict:
    item = {"type": "message", "id": f"msg_{number}", "role": "assistant"}
    return {"id": f"resp_{number}", "output": [item | {"content": [{"type": "output_text", "text": "a" * 1000}]}]}


def test_a_response_has_a_size_and_expires(monkeypatch):
    now = 0.0
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now)
    store = ResponseStore(20_000, 60)
    store.add(response(0), [user("Hi")], [user("Hi")])
    size = store.get("resp_0").size
    assert 2000 < size < 4000  # as JSON, and as a message
    store.add(response(1), store.get("resp_0").messages, [])
    now = 50.0
    assert len(store.get("resp_1", renews=True).messages) == 3 and store.output_item("msg_1").role == "assistant"
    now = 100.0  # resp_1 was continued 50 seconds ago, and resp_0 was never
    assert store.get("resp_0") is None and store.output_item("msg_0") is None and not store.remove("resp_0")
    assert store.get("resp_1") and store.remove("resp_1") and not store.remove("resp_1")
    for number in range(2, 20):
        store.add(response(number), [user("Hi")], [user("Hi")])
        assert store._num_bytes == sum(stored.size for _, stored in store._stored.values()) <= 20_000
    there = [store.get(f"resp_{number}") is not None for number in range(2, 20)]
    assert there == sorted(there) and sum(there) == 20_000 // size
    now = 161.0
    assert store.get("resp_19") is None
    assert store._num_bytes == len(store._stored) == len(store._response_ids) == 0


@pytest.mark.parametrize("arguments", [{"a": "x" * 10**6}, ["x" * 10**6], "x" * 10**6, None])
def test_what_is_stored_of_a_call_is_a_text(arguments):
    [item] = ITEMS.validate_python([{"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}])
    [message] = messages_of([item])
    shown = json.dumps(arguments) if isinstance(arguments, dict) else arguments if isinstance(arguments, str) else "{}"
    assert message["tool_calls"][0]["function"]["arguments"] == shown


def test_metadata_and_instructions_evict_no_other_response(engine, app):
    for metadata in ({"a": "a" * 513}, {"a" * 65: "a"}, {str(i): "a" for i in range(17)}):
        assert refusal(app, RESPONSES, {"input": "Hi", "metadata": metadata})["param"].startswith("metadata")
    most = post(app, input="Hi", metadata={f"{i:064}": "é" * 512 for i in range(16)})
    assert most["store"] and len(most["metadata"]) == 16
    small = make_app(engine, max_stored_bytes=8_000)
    made = post(small, input="Hi")
    assert made["store"] and not post(small, input="Hi", instructions="Be brief. " * 200)["store"]
    tool = {"type": "function", "name": "f", "description": "\x01" * 1000}  # JSON has six characters for each
    assert not post(small, input="Hi", tools=[tool], tool_choice="none")["store"]
    schema = {"type": "object", "title": "a" * 5000}
    assert not post(small, input="Hi", text={"format": {"type": "json_schema", "name": "a", "schema": schema}})["store"]
    assert call(small, "GET", f"{RESPONSES}/{made['id']}").status_code == 200


@pytest.mark.parametrize("text", ["{" + "a" * 10**6, "{ " + " ," * 900_000])
def test_long_arguments_of_a_call_keep_no_one_waiting(app, text):
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": text}
    begin = time.thread_time()
    error = refusal(app, RESPONSES, {"input": [item]})
    assert time.thread_time() - begin < 2 and error["code"] == "context_length_exceeded"


def test_calls_that_follow_each_other_are_limited(app):
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    check_refusal(app, RESPONSES, {"input": [item] * 129}, "input", "input: more than 128 calls follow each other")


@pytest.mark.parametrize("depth", [30, 240, 300])
def test_a_conversation_with_nested_arguments_goes_on(app, depth):
    arguments = functools.reduce(lambda inner, _: [inner], range(depth), 1)
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": {"a": arguments}}
    made = post(app, input=[user("Hi"), item])
    assert post(app, input="And now?", previous_response_id=made["id"])["store"]


def test_a_stored_conversation_is_counted_in_the_bytes_of_a_request(engine):
    app = make_app(engine, max_bodies_bytes=1500)
    made = post(app, input="x" * 300)
    error = refusal(app, RESPONSES, {"input": "And now?", "previous_response_id": made["id"]}, 429)
    assert error["code"] == "engine_busy"
    post(app, input="x" * 300)  # its bytes are free again


def test_each_reference_to_an_item_is_counted_in_the_bytes_of_a_request(engine):
    """A prompt has the text of the item as often as it is referred to."""
    app = make_app(engine, max_bodies_bytes=100_000)
    made = post(app, input="Hi", max_output_tokens=300, ignore_eos=True)
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    for number, status in ((1, 200), (900, 429), (1, 200)):
        body = {"input": [user("Hi"), *[reference] * number, user("And now?")], "max_output_tokens": 1}
        assert call(app, "POST", RESPONSES, json=body).status_code == status


def test_many_references_to_one_item_are_quick(app):
    made = post(app, input="Hi", max_output_tokens=400, ignore_eos=True, top_logprobs=20)
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    begin = time.thread_time()
    assert refusal(app, RESPONSES, {"input": [user("Hi"), *[reference] * 4000]})["param"] == "input"
    assert time.thread_time() - begin < 5
    stored = call(app, "GET", f"{RESPONSES}/{made['id']}").json()
    assert len(made["output"][0]["content"][0].pop("logprobs")) == 400
    assert stored["output"][0]["content"][0].pop("logprobs") == [] and stored == made


@pytest.mark.network
@pytest.mark.parametrize("keys", [{"include": INCLUDE}, {"top_logprobs": 3}, {"include": INCLUDE, "top_logprobs": 3}])
def test_log_probabilities_are_those_of_a_chat(app, client, keys):
    asked = chat("Hello", max_tokens=12, logprobs=True, top_logprobs=keys.get("top_logprobs", 0))
    want = answered(app, CHAT, asked)["choices"][0]["logprobs"]["content"]
    whole = create(client, **keys)
    events = [*create(client, stream=True, **keys)]
    for response in (whole, events[-1].response):
        assert [one.model_dump() for one in response.output[0].content[0].logprobs] == want
        assert response.top_logprobs == keys.get("top_logprobs", 0)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == [one["token"] for one in want]
    [added] = [event for event in events if event.type == "response.content_part.added"]
    assert added.part.logprobs == []
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [one.token for one in done.logprobs] == [one["token"] for one in want]


def test_a_response_has_a_limited_number_of_log_probabilities(app, monkeypatch):
    monkeypatch.setattr("mmvllm.server.common.response_builder.MAX_LOGPROBS_OF_RESPONSE", 10)
    body = {"input": "Hi", "top_logprobs": 5, "max_output_tokens": 4, "ignore_eos": True}
    check_refusal(app, RESPONSES, body, "top_logprobs", "lower top_logprobs, or max_output_tokens")
