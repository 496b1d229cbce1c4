"""Conversion of OpenAI requests to engine requests."""

import pytest
from PIL import Image

from mmvllm import SamplingParams
from mmvllm.server.convert import (
    DetailLimits,
    chat_params,
    chat_request,
    completion_params,
    images_of,
    max_pixels_of,
    prompts_of,
)
from mmvllm.server.errors import ApiError
from mmvllm.server.protocol import ChatRequest, CompletionRequest
from mmvllm.server.response_builder import token_text
from tests.helpers.images import image_config
from tests.helpers.requests import digests_of
from tests.helpers.server import chat, image_part, user

TOKEN = 28 * 28
LIMITS = DetailLimits.of(image_config(max_pixels=16384 * TOKEN))


def request(*parts, **keys) -> ChatRequest:
    return ChatRequest(**chat(*parts, **keys))


def engine_request(*parts, **keys) -> dict:
    body = request(*parts, **keys)
    return chat_request(
        body, [image.url.encode() for image in images_of(body)], max_pixels_of(body, images_of(body), LIMITS)
    )


def image_parts(made: dict) -> list[dict]:
    return [part for message in made["messages"] for part in message["content"] if part["type"] == "image"]


@pytest.mark.parametrize(
    ("checkpoint", "auto", "expected"),
    [
        (16384, None, (256, 1280, 16384)),
        (600, None, (256, 600, 600)),
        (49, None, (49, 49, 49)),
        (16384, 100, (100, 100, 16384)),
        (600, 2000, (256, 2000, 2000)),
    ],
)
def test_the_limits_of_details_are_ordered(checkpoint, auto, expected):
    config = image_config(min_pixels=TOKEN, max_pixels=checkpoint * TOKEN)
    limits = DetailLimits.of(config, auto and auto * TOKEN)
    assert (limits.low, limits.auto, limits.high) == tuple(tokens * TOKEN for tokens in expected)


@pytest.mark.parametrize(("detail", "tokens"), [("low", 256), ("auto", 1280), (None, 1280), ("high", 16384)])
def test_images_of_one_detail_set_the_limit_of_the_request(detail, tokens):
    made = engine_request(image_part("a", detail=detail), "Hi", image_part("b", detail=detail))
    assert made["max_pixels"] == tokens * TOKEN
    assert image_parts(made) == [{"type": "image", "image": b"a"}, {"type": "image", "image": b"b"}]


def test_an_image_of_lower_detail_than_another_has_its_own_limit():
    made = engine_request(image_part("a", detail="low"), image_part("b", detail="high"), image_part("c"))
    assert made["max_pixels"] == 16384 * TOKEN
    assert [image.get("max_pixels") for image in image_parts(made)] == [256 * TOKEN, None, 1280 * TOKEN]


def test_max_pixels_replaces_the_limits_of_auto_and_high():
    made = engine_request(
        image_part("a", detail="low"), image_part("b", detail="high"), image_part("c"), max_pixels=TOKEN * 300
    )
    assert made["max_pixels"] == 300 * TOKEN
    assert [image.get("max_pixels") for image in image_parts(made)] == [256 * TOKEN, None, None]


def test_text_only_requests_have_no_pixel_limits():
    made = engine_request("Hi", min_pixels=5, cache_salt="x")
    assert made.keys() == {"messages", "cache_salt"}


def test_messages_keep_their_order_and_developer_becomes_system():
    body = ChatRequest(
        model="m",
        messages=[
            {"role": "developer", "content": "Be brief."},
            user("a", image_part("1"), "b"),
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            user(image_part("2")),
        ],
    )
    assert [image.param for image in images_of(body)] == [
        "messages[1].content[1].image_url.url",
        "messages[3].content[0].image_url.url",
    ]
    made = chat_request(body, [b"1", b"2"], max_pixels_of(body, images_of(body), LIMITS))["messages"]
    assert made == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image", "image": b"1"},
                {"type": "text", "text": "b"},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        {"role": "user", "content": [{"type": "image", "image": b"2"}]},
    ]


def test_ignored_fields_are_not_kept():
    body = request("Hi", user="x", metadata={"a": "b"})
    assert body.user is None and body.metadata is None


def test_default_parameters_are_those_of_openai():
    del (body := chat("Hi"))["temperature"]
    assert chat_params(ChatRequest(**body), 99) == SamplingParams(temperature=1.0, max_tokens=99)
    assert completion_params(CompletionRequest(model="m", prompt="Hi"), 99) == SamplingParams(
        temperature=1.0, max_tokens=16
    )


def test_every_parameter_reaches_the_engine():
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "n": 3,
        "seed": -4,
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "min_tokens": 2,
        "max_tokens": 10,
        "ignore_eos": True,
    }
    assert chat_params(request("Hi", **given, logprobs=True, top_logprobs=4), 99) == SamplingParams(**given, logprobs=4)
    assert completion_params(CompletionRequest(model="m", prompt="", **given), 99) == SamplingParams(**given)


def test_equal_limits_under_both_names_are_accepted():
    assert chat_params(request("Hi", max_tokens=5, max_completion_tokens=5), 99).max_tokens == 5
    with pytest.raises(ApiError):
        chat_params(request("Hi", max_tokens=5, max_completion_tokens=6), 99)


@pytest.mark.parametrize(
    ("prompt", "expected"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_prompts_have_four_shapes(prompt, expected):
    assert prompts_of(CompletionRequest(model="m", prompt=prompt)) == expected


def test_incomplete_utf8_is_shown_as_bytes():
    assert token_text("é".encode()) == "é" and token_text("é".encode()[:1]) == "bytes:\\xc3"


def test_one_detail_gives_the_same_input_as_max_pixels_of_the_request(engine):
    """Only images with a smaller limit than others in the request are resized twice."""
    process = engine._intake.processor
    image = Image.effect_noise((300, 200), 90).convert("RGB")
    body = request(image_part("x", detail="low"), "Hi")
    limits = DetailLimits.of(engine.image_config, 28 * 28 * 30)
    made = process(chat_request(body, [image], max_pixels_of(body, images_of(body), limits)))
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Hi"}]}]
    reference = process({"messages": messages, "max_pixels": 28 * 28 * 30})
    assert made.token_ids == reference.token_ids
    assert digests_of(made) == digests_of(reference)
