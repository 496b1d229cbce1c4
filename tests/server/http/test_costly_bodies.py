"""Bodies that would take long to parse or to answer, or whose response would be as large as the request."""

import asyncio
import gc
import json
import re
import threading
import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from mmvllm.outputs import CompletionOutput, Delta, RequestOutput
from mmvllm.processors.tensors import own_token_ids
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.chat import serving as chat_serving
from mmvllm.server.chat.builder import ChatResponseBuilder
from mmvllm.server.common import job_response, response_builder, serving
from mmvllm.server.common.job_response import MAX_QUEUED, JobResponse
from mmvllm.server.common.protocol import MAX_ALLOWED_IDS, MAX_PARTS
from mmvllm.server.embeddings import builder as embedding_builder
from mmvllm.server.http import body as body_module
from mmvllm.server.http.auth_and_limits import ByteReservation
from mmvllm.server.http.body import MANY_BYTES
from mmvllm.server.responses.as_chat import image_params_of
from mmvllm.structured.schema_keywords import MAX_SCHEMAS
from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    answered,
    call,
    chat,
    completion,
    error_of,
    make_app,
    user,
)
from tests.server.refusals import JSON, check_refusal, refusal


def function(name: str = "f", **schema) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}


def form_of(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.mark.parametrize(
    "body",
    [
        chat("Hello", **{"x" * 2**20: 1}),
        chat("Hello") | {"stream_options": {"\u00e9" * 2**20: 1}},
        chat({"type": "x" * 2**20}),
        chat("Hello", **{f"key {i}": 1 for i in range(900)}),
        chat("Hello") | {"model": "x" * 2**20},
    ],
    ids=["key", "key of an object", "type", "many keys", "model"],
)
def test_an_error_is_small_even_if_what_is_wrong_is_not(app, body):
    answer = call(app, "POST", CHAT, json=body)
    assert answer.status_code in (400, 404) and len(answer.content) < 2000
    error_of(answer)


def test_long_integers_are_refused_before_they_are_parsed(app):
    numbers = ",".join(["9" * 4000] * 3000)  # parsing them all takes 2.5 s
    body = f'{{"metadata": [{numbers}], and no JSON after them'.encode()
    check_refusal(app, CHAT, body, None, "an integer must have at most 500 digits, got 4000")


def test_many_escapes_are_refused_before_they_are_parsed(app):
    body = b'{"metadata": "' + b"\\/" * 5_000_001 + b" and no JSON"
    check_refusal(app, CHAT, body, None, "the body has more than 5000000 backslashes")


@pytest.mark.parametrize(
    "messages",
    [
        [user("Hi")] * (MAX_PARTS // 2 + 1),
        [user(*["Hi"] * MAX_PARTS)],
        [{"role": "user", "content": ""}] * 40_000,
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 100}] * (MAX_PARTS // 100 + 1),
    ],
)
def test_too_many_parts_are_refused_before_they_are_validated(app, messages):
    body = chat("Hi") | {"messages": [{"role": "nobody"}, *messages]}
    check_refusal(app, CHAT, body, "messages", f"at most {MAX_PARTS} are accepted")


def test_as_many_parts_as_are_allowed_are_accepted(app):
    body = chat(*[""] * (MAX_PARTS - 1), max_tokens=1)
    assert call(app, "POST", CHAT, json=body).status_code == 200


MANY = [0] * 100_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat("Hi", chat_template_kwargs={"a": MANY}), "chat_template_kwargs"),
        (CHAT, chat("Hi", tools=[function(enum=MANY[:2000], name=f"f{i}") for i in range(50)]), "tools"),
        ("/v1/responses", {"model": "bundled", "input": "Hi", "tools": [{"type": "function", "a": MANY}]}, "tools"),
        (CHAT, chat("Hi", guided_json={"enum": MANY}), "guided_json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_more_values_than_a_prompt_can_show_are_refused_before_they_are_copied(app, path, body, param):
    most = 32768 if param in ("tools", "chat_template_kwargs") else 65536
    check_refusal(app, path, body, param, f"has more than {most} values")


PARTS = {"anyOf": [{}] * MAX_SCHEMAS}
STRICT = [{"type": "function", "function": {"name": name, "parameters": PARTS, "strict": True}} for name in "ab"]


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"guided_json": json.dumps(PARTS)}, "guided_json"),
        ({"response_format": form_of(PARTS)}, "response_format.json_schema.schema"),
        ({"tools": STRICT[:1]}, "tools"),
        ({"tools": [one["function"] | {"type": "function"} for one in STRICT]}, "tools"),
    ],
    ids=["text", "format", "tool", "tools of a response"],
)
def test_more_schemas_than_can_be_looked_into_are_refused(app, keys, param):
    is_response = "name" in keys.get("tools", [{}])[0]
    body = {"input": "Hi", **keys} if is_response else chat("Hi", **keys)
    check_refusal(app, RESPONSES if is_response else CHAT, body, param, f"more than {MAX_SCHEMAS} schemas within")


@pytest.mark.parametrize(
    ("keys", "is_costly"),
    [
        ({}, False),
        ({"guided_json": {"type": "object"}}, True),
        ({"tools": STRICT}, True),
        ({"functions": [one["function"] for one in STRICT]}, True),
    ],
)
def test_schemas_are_looked_into_beside_the_event_loop(engine, monkeypatch, keys, is_costly):
    names, make = [], chat_serving.chat_job
    monkeypatch.setattr(
        chat_serving, "chat_job", lambda *args: (names.append(threading.current_thread().name), make(*args))[1]
    )
    call(make_app(engine), "POST", CHAT, json=chat("Hi", max_tokens=1, **keys))
    assert [name.startswith("mmvllm-build") for name in names] == [is_costly]


def test_of_many_inputs_few_are_tasks_at_a_time(engine, app, monkeypatch):
    most, generate = 0, engine.generate

    async def counted(*args, **keys):
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        async for delta in generate(*args, **keys):
            yield delta

    monkeypatch.setattr(engine, "generate", counted)
    answer = call(app, "POST", EMBEDDINGS, json={"input": ["Hi"] * 300, "dimensions": 2})
    assert [one["index"] for one in answer.json()["data"]] == [*range(300)]
    assert 1 < most < engine.max_num_seqs + 20


@pytest.mark.parametrize("place", [0, 1, 250, 499, 500, 501, 502])
@pytest.mark.parametrize("number", [500, 501])
def test_a_long_integer_is_found_wherever_it_is(app, place, number):
    body = " " * place + '{"metadata": ' + "9" * number + ', "messages": []}'
    answer = call(app, "POST", CHAT, content=body, headers=JSON)
    assert ("an integer must have at most 500 digits, got 501" in answer.text) is (number == 501)


def test_digits_of_a_text_are_no_integer(app):
    body = '{"prompt": "' + "7" * 600 + '", "max_tokens": 1}'
    assert call(app, "POST", COMPLETIONS, content=body, headers=JSON).status_code == 200


def test_arguments_of_an_earlier_call_with_many_values_are_not_copied(app):
    calls = [{"function": {"name": "f", "arguments": {"a": MANY}}}]
    messages = [user("Hi"), {"role": "assistant", "tool_calls": calls}]
    assert call(app, "POST", CHAT, json=chat(messages=messages, max_tokens=1)).is_success


IDS = [*range(20, 30)]
LARGE = [  # the path, the body, what its response has of values that are counted, and the field that errors name
    (COMPLETIONS, completion(prompt=[IDS] * 3, max_tokens=0, prompt_logprobs=4), 3 * 10 * 5, "prompt_logprobs"),
    (COMPLETIONS, completion(prompt=[IDS] * 3, max_tokens=0, echo=True, logprobs=4), 3 * 10 * 5, "logprobs"),
    (
        COMPLETIONS,
        completion(prompt=IDS, echo=True, logprobs=4, n=3, max_tokens=2, ignore_eos=True),
        3 * 12 * 5,
        "logprobs",
    ),
    (COMPLETIONS, completion(prompt=IDS, prompt_logprobs=4, n=3, max_tokens=2), 3 * 10 * 5, "prompt_logprobs"),
    (COMPLETIONS, completion(prompt=[IDS] * 2, logprobs=4, max_tokens=6, ignore_eos=True), 2 * 6 * 5, "logprobs"),
    (CHAT, chat("Hi", logprobs=True, top_logprobs=4, n=3, max_tokens=6, ignore_eos=True), 3 * 6 * 5, "top_logprobs"),
    (EMBEDDINGS, {"model": "bundled", "input": [IDS] * 3, "dimensions": 8}, 3 * 8, "input"),
]


@pytest.mark.parametrize("path, body, number, field", LARGE)
def test_the_values_of_a_response_are_limited(app, monkeypatch, path, body, number, field):
    for limit in (number, number - 1):
        monkeypatch.setattr(response_builder, "MAX_LOGPROBS_OF_RESPONSE", limit)
        monkeypatch.setattr(embedding_builder, "MAX_NUMBERS", limit)
        if limit == number:
            answered(app, path, body)
    error = refusal(app, path, body)
    assert error["param"] == field and str(limit) in error["message"] and field in error["message"]


def test_prompt_logprobs_of_a_chat_are_counted_once(app, monkeypatch):
    body = chat("Hello", prompt_logprobs=4, n=3, max_tokens=1)
    num_tokens = answered(app, CHAT, body)["usage"]["prompt_tokens"]
    monkeypatch.setattr(response_builder, "MAX_LOGPROBS_OF_RESPONSE", num_tokens * 5)
    answered(app, CHAT, body)
    monkeypatch.setattr(response_builder, "MAX_LOGPROBS_OF_RESPONSE", num_tokens * 5 - 1)
    assert refusal(app, CHAT, body)["param"] == "prompt_logprobs"


def test_a_stream_is_limited_by_its_echo_alone(app, monkeypatch):
    body = completion(prompt=IDS, echo=True, logprobs=4, max_tokens=9, stream=True, ignore_eos=True)
    monkeypatch.setattr(response_builder, "MAX_LOGPROBS_OF_RESPONSE", 10 * 5)
    assert "[DONE]" in call(app, "POST", COMPLETIONS, json=body).text
    monkeypatch.setattr(response_builder, "MAX_LOGPROBS_OF_RESPONSE", 10 * 5 - 1)
    refusal(app, COMPLETIONS, body)


@pytest.mark.parametrize(
    ("path", "body", "number", "field"),
    [
        (COMPLETIONS, completion(prompt=[IDS] * 2, logprobs=4, best_of=3, max_tokens=2), 2 * 3 * 2 * 5, "logprobs"),
        (CHAT, chat("Hi", logprobs=True, top_logprobs=4, beam_width=3, max_tokens=2), 3 * 2 * 5, "top_logprobs"),
    ],
)
def test_candidates_that_are_chosen_among_have_few_values(app, monkeypatch, path, body, number, field):
    """They are kept until the end, and counted before the beginning."""
    monkeypatch.setattr(serving, "MAX_LOGPROBS_OF_CANDIDATES", number)
    answered(app, path, body)
    monkeypatch.setattr(serving, "MAX_LOGPROBS_OF_CANDIDATES", number - 1)
    check_refusal(app, path, body, field, "number of candidates")


def test_vectors_in_base64_are_not_limited(app, monkeypatch):
    monkeypatch.setattr(embedding_builder, "MAX_NUMBERS", 1)
    body = {"model": "bundled", "input": [IDS] * 3, "encoding_format": "base64"}
    assert len(call(app, "POST", EMBEDDINGS, json=body).json()["data"]) == 3


@pytest.mark.parametrize("path, body, number, field", LARGE)
def test_a_large_response_is_made_in_a_thread_and_is_the_same(app, monkeypatch, path, body, number, field):
    body = body | {"temperature": 0} if "input" not in body else body
    made, threads, content = [], [], JobResponse._content

    def noted(*given):
        threads.append(threading.current_thread().name)
        return content(*given)

    monkeypatch.setattr(JobResponse, "_content", noted)
    for limit in (number + 1, number):
        monkeypatch.setattr(job_response, "MANY_VALUES", limit)
        answer = call(app, "POST", path, json=body).json()
        text = json.dumps([answer.get(name) for name in ("choices", "data")])
        made.append(re.sub(r"-?[0-9]+\.[0-9]+(e-[0-9]+)?", "x", text))  # the batches differ, and so the last digits
    assert made[0] == made[1] and "x" in made[0]
    assert [name.startswith("mmvllm-response") for name in threads] == [False, True]


def test_a_stream_with_much_to_send_leaves_the_event_loop_free(app, engine, monkeypatch):
    """Whatever has been generated meanwhile is not sent in one piece."""
    turns, seen = 0, []

    async def generate(_request, params, **_):
        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count_turns())
        for _ in range(300):
            seen.append(turns)
            yield Delta("a", 0, "x", [5])
        counting.cancel()
        output = RequestOutput("a", [CompletionOutput("x" * 300, [5] * 300, "length")])
        yield Delta("a", 0, "", [], finish_reason="length", output=output)

    monkeypatch.setattr(engine, "generate", generate)
    text = call(app, "POST", COMPLETIONS, json=completion(stream=True)).text
    assert text.count('"text":"x"') == 300
    assert seen[-1] > 300 - 2 * MAX_QUEUED


def test_log_probabilities_of_a_stream_are_written_in_a_thread_if_there_are_many(app, monkeypatch):
    threads, chunks = [], ChatResponseBuilder.chunks
    monkeypatch.setattr(
        ChatResponseBuilder, "chunks", lambda *given: threads.append(threading.current_thread().name) or chunks(*given)
    )
    for limit, in_thread in ((4, True), (5000, False)):
        monkeypatch.setattr(job_response, "MANY_VALUES", limit)
        body = chat("Hi", logprobs=True, top_logprobs=4, max_tokens=4, stream=True)
        assert "[DONE]" in call(app, "POST", CHAT, json=body).text
        assert {name.startswith("mmvllm-response") for name in threads} == {in_thread}
        threads.clear()


def test_ids_that_are_cut_off_are_not_copied(app, engine, monkeypatch):
    """A million of them took the event loop 0.3 s for each request."""
    seen, generate = [], engine.generate
    monkeypatch.setattr(
        engine, "generate", lambda given, *args, **keys: seen.append(given) or generate(given, *args, **keys)
    )
    ids = [*range(5, 300)] * 100
    for side, want in (("left", ids[-5:]), ("right", ids[:5])):
        keys = {"truncate_prompt_tokens": 5, "truncation_side": side}
        for path, field in ((COMPLETIONS, "prompt"), (EMBEDDINGS, "input")):
            assert call(app, "POST", path, json={"model": "bundled", field: [ids, [7]], **keys}).is_success
        assert [one["prompt_token_ids"] for one in seen] == [want, [7]] * 2
        seen.clear()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion(prompt="a " * 500, max_tokens=1, echo=True, logprobs=5)),
        (COMPLETIONS, completion(prompt="a " * 500, max_tokens=1, echo=True, logprobs=5, stream=True)),
        (EMBEDDINGS, {"input": ["a"] * 40, "dimensions": 192}),
    ],
)
def test_a_response_that_a_client_has_not_read_counts_with_the_bytes_of_requests(engine, monkeypatch, path, body):
    app, held = make_app(engine, max_bodies_bytes=10_000), []
    hold = ByteReservation.hold
    monkeypatch.setattr(ByteReservation, "hold", lambda self, size: held.append(size) or hold(self, size))
    answer = call(app, "POST", path, json=body)  # it is not refused itself
    assert answer.status_code == 200 and len(answer.content) / 2 < sum(held) <= len(answer.content)
    assert call(app, "POST", path, json=body).status_code == 200


def test_log_probabilities_are_not_kept_beside_the_response_that_has_them(engine, monkeypatch):
    def outputs() -> list[RequestOutput | CompletionOutput]:
        return [one for one in gc.get_objects() if isinstance(one, RequestOutput | CompletionOutput)]

    def hold(reservation, num_bytes):
        kept.extend(one for one in outputs() if id(one) not in others)

    kept, earlier = [], outputs()
    others = {*map(id, earlier)}
    monkeypatch.setattr(ByteReservation, "hold", hold)
    body = completion(prompt="a " * 500, max_tokens=2, logprobs=3, prompt_logprobs=3)
    assert call(make_app(engine), "POST", COMPLETIONS, json=body).json()["choices"][0]["prompt_logprobs"]
    assert kept and not any(one.logprobs or getattr(one, "prompt_logprobs", None) for one in kept)


def test_a_large_body_is_validated_before_the_next_one_is_parsed(app, monkeypatch):
    """Parsed bodies take far more memory, and validations in a row kept the event loop for seconds."""
    events = []

    class Body(dict):
        def values(self):  # of the first validator
            events.append("validated")
            return super().values()

    def parse(body: bytes) -> Body:
        events.append("parsed")
        loop.call_soon_threadsafe(time.sleep, 0.2)  # meanwhile the next one would be parsed
        return Body(json.loads(body))

    async def send_all() -> list:
        nonlocal loop
        loop = asyncio.get_running_loop()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "a" * MANY_BYTES, "unknown": 1}
            return await asyncio.gather(*(client.post(COMPLETIONS, json=body) for _ in range(4)))

    loop = None
    monkeypatch.setattr(body_module, "parse", parse)
    assert [answer.status_code for answer in asyncio.run(send_all())] == [400] * 4
    assert events == ["parsed", "validated"] * 4


def test_a_vocabulary_of_token_ids_is_read_quickly():
    ids = [*range(2**18)]

    def seconds(given: list) -> float:
        begin = time.thread_time()
        SamplingParams(allowed_token_ids=given)
        own_token_ids(given)
        return time.thread_time() - begin

    numbers = [*map(np.int64, ids)]  # which are looked at one by one
    assert min(seconds(ids) for _ in range(3)) < 0.3 * min(seconds(numbers) for _ in range(3))
    assert SamplingParams(allowed_token_ids=numbers) == SamplingParams(allowed_token_ids=ids)


def test_allowed_tokens_are_limited(app):
    body = chat("Hi", allowed_token_ids=[5] * (MAX_ALLOWED_IDS + 1))
    check_refusal(app, CHAT, body, "allowed_token_ids", str(MAX_ALLOWED_IDS))


def test_tools_that_do_not_fit_are_refused_before_their_schemas_are_read(app):
    properties = {"n" * 59_000: {"type": "object", "properties": {f"{i:x}": {} for i in range(80)}}}
    tools = [function(f"f{i}", properties=properties) for i in range(128)]
    for tool in tools:
        tool["function"]["strict"] = True
    begin = time.thread_time()
    check_refusal(app, CHAT, chat("Hi", tools=tools), "tools", "must have at most 65536 characters")
    assert time.thread_time() - begin < 4  # 20 s, if all are read


def test_every_entry_of_a_bias_that_is_documented_is_accepted(app):
    bias = {str(i): 0.5 for i in range(700)} | {f"{i:04}": 0.5 for i in range(324)}
    assert len(bias) == 1024 and call(app, "POST", CHAT, json=chat("Hi", max_tokens=1, logit_bias=bias)).is_success
    error = refusal(app, CHAT, chat("Hi", logit_bias=bias | {"1024": 1}))
    assert error["message"] == "an object of the body must have at most 1024 keys, got 1025"


def test_a_long_input_is_not_read_letter_by_letter():
    class Text(str):
        def __iter__(self):
            raise AssertionError("a text has no parts")

    items = [SimpleNamespace(content=Text("long"), output=Text("long")), SimpleNamespace(content=None)]
    assert image_params_of(items) == []
