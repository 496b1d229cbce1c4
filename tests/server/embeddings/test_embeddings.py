"""POST /v1/embeddings: the openai client, conversations as vLLM takes them, and refusals."""

import base64

import numpy as np
import pytest
import torch

from tests.helpers.engine.requests import ask
from tests.helpers.serving.server import (
    EMBEDDINGS,
    SCENES,
    TOKENIZE,
    answered,
    data_uri,
    image_part,
    metric_samples,
    user,
)
from tests.server.refusals import check_refusal


@pytest.fixture(scope="module")
def offline(bundled_llm):
    return lambda requests, **keys: [one.embedding for one in bundled_llm.embed(requests, use_tqdm=False, **keys)]


def embed(app, **keys) -> dict:
    return answered(app, EMBEDDINGS, {"model": "bundled", **keys})


def vectors(answer: dict) -> np.ndarray:
    assert [one["index"] for one in answer["data"]] == [*range(len(answer["data"]))]
    return np.array([one["embedding"] for one in answer["data"]], dtype=np.float32)


@pytest.mark.spawns
def test_the_openai_client_gets_vectors(running, offline):
    """It asks for base64 unless it is told otherwise."""
    with running.client() as client:
        for inputs in ("Hello", ["Hello", "a red circle"], [5, 6, 7], [[5, 6, 7], [8]]):
            want = offline(inputs)
            for keys in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
                answer = client.embeddings.create(model="bundled", input=inputs, **keys)
                got = [one.embedding for one in answer.data]
                if "base64" in keys.values():
                    got = [np.frombuffer(base64.b64decode(one), "<f4") for one in got]
                np.testing.assert_allclose(np.array(got), want, atol=1e-5)
            assert answer.model == "bundled" and answer.usage.prompt_tokens == answer.usage.total_tokens > 0
        cut = client.embeddings.create(model="bundled", input="Hello", dimensions=8, extra_body={"pooling": "mean"})
        np.testing.assert_allclose([cut.data[0].embedding], offline("Hello", dimensions=8, pooling="mean"), atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "<f4"),
        ({"endianness": "big"}, ">f4"),
        ({"embed_dtype": "float16", "endianness": "big"}, ">f2"),
        ({"embed_dtype": "float32", "endianness": "native"}, "=f4"),
    ],
)
def test_vectors_in_base64_have_the_dtype_that_is_asked_for(keys, dtype, app):
    want = vectors(embed(app, input="Hello"))
    (one,) = embed(app, input="Hello", encoding_format="base64", **keys)["data"]
    got = np.frombuffer(base64.b64decode(one["embedding"]), dtype)
    assert np.array_equal(got, want[0].astype(dtype))


@pytest.mark.parametrize("order", ["little", "big"])
def test_vectors_in_base64_may_be_bfloat16(order, app):
    want = torch.from_numpy(vectors(embed(app, input="Hello"))[0]).bfloat16()
    keys = {"encoding_format": "base64", "embed_dtype": "bfloat16", "endianness": order}
    (one,) = embed(app, input="Hello", **keys)["data"]
    bits = np.frombuffer(base64.b64decode(one["embedding"]), "<i2" if order == "little" else ">i2")
    assert np.array_equal(bits, want.view(torch.int16).numpy())


def test_use_activation_is_vllms_name_of_normalize(app):
    raw, unit = (vectors(embed(app, input="Hello", use_activation=value)) for value in (False, True))
    assert np.array_equal(unit, vectors(embed(app, input="Hello"))) and not np.allclose(raw, unit)
    assert np.array_equal(raw, vectors(embed(app, input="Hello", use_activation=True, normalize=False)))


@pytest.mark.spawns
def test_a_conversation_with_an_image_has_a_vector(app, offline):
    messages = [user(image_part(data_uri(SCENES[0])), "What is this?")]
    answer = embed(app, messages=messages, cache_salt="x")
    want = offline([ask({"type": "image", "image": SCENES[0]}, "What is this?")])
    np.testing.assert_allclose(vectors(answer), want, atol=1e-5)
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    unscaled = vectors(embed(app, messages=messages, normalize=False))
    np.testing.assert_allclose(unscaled / np.linalg.norm(unscaled), want, atol=1e-5)


def test_a_conversation_has_its_tools_in_the_prompt(app):
    tools = [{"type": "function", "function": {"name": "count"}}]
    given = {"messages": [user("What is this?")], "tools": tools}
    tokens = answered(app, TOKENIZE, given)["tokens"]
    np.testing.assert_allclose(vectors(embed(app, **given)), vectors(embed(app, input=tokens)), atol=1e-5)


@pytest.mark.slow
def test_more_inputs_than_the_engine_admits(engine, app, offline):
    inputs = [f"input {i}" for i in range(engine.max_requests + 40)]
    np.testing.assert_allclose(vectors(embed(app, input=inputs)), offline(inputs), atol=1e-4)


def test_embeddings_are_no_completions_in_the_metrics(app):
    before = metric_samples(app)
    embed(app, input="Hello")
    after = metric_samples(app)
    answers = {key: value for key, value in after.items() if key[0] == "mmvllm_answers_total"}
    assert answers == {key: value for key, value in before.items() if key[0] == "mmvllm_answers_total"}


@pytest.mark.parametrize(
    ("keys", "param", "words"),
    [
        ({}, "input", "give input or messages"),
        ({"input": "a", "messages": [user("a")]}, "messages", "give input or messages"),
        ({"input": ""}, "input", "prompt is empty"),
        ({"input": [[1], []]}, "input[1]", "at least 1"),
        ({"input": [10**6]}, "input", "token ids of a prompt must be integers in [0, 768), got 1000000"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a " * 40000}, "input", "maximum context length is 2048 tokens"),
        ({"input": "a", "dimensions": 4000}, "dimensions", "dimensions must be at most 192, the hidden size"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", 'needs encoding_format "base64"'),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be at least 1, or -1"),
        ({"messages": [user("a")], "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "is for input"),
        ({"input": "a", "allow_special_tokens": True}, "allow_special_tokens", "not allowed by this server"),
        ({"messages": [user(image_part("data:,x"))]}, "messages[0].content[0].image_url.url", "image"),
        ({"input": "a", "cache_salt": "x"}, "cache_salt", "cache_salt is for messages"),
        ({"input": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "is for messages"),
        ({"input": "a", "model": "x"}, "model", "does not exist"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_an_error_names_the_field(app, keys, param, words):
    check_refusal(app, EMBEDDINGS, {"model": "bundled", **keys}, param, words)
