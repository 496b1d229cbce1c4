"""Conversion of OpenAI requests to engine requests."""

import pytest
from PIL import Image
from pydantic import ValidationError

from mmvllm.server.chat.protocol import ChatRequest
from mmvllm.server.common.conversation import DetailLimits, chat_request, images_of, max_pixels_of
from mmvllm.server.common.response_builder import token_name
from mmvllm.server.common.videos import videos_of
from mmvllm.server.errors import ApiError
from mmvllm.server.responses.as_chat import as_chat, messages_of
from mmvllm.server.responses.protocol import ResponsesRequest
from tests.helpers.engine.requests import digests_of
from tests.helpers.media.images import image_config
from tests.helpers.serving.server import chat, image_part, user

TOKEN = 28 * 28
LIMITS = DetailLimits.of(image_config(max_pixels=16384 * TOKEN))


def max_pixels(body: ChatRequest, limits: DetailLimits = LIMITS) -> list[int]:
    bounds = body.min_pixels, body.max_pixels, body.mm_processor_kwargs
    return max_pixels_of(images_of(body.messages), limits, *bounds)


def request(*parts, **keys) -> ChatRequest:
    return ChatRequest(**chat(*parts, **keys))


def engine_request(*parts, **keys) -> dict:
    body = request(*parts, **keys)
    return chat_request(body, [image.url.encode() for image in images_of(body.messages)], max_pixels(body))


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


SIZES = [
    {"max_pixels": TOKEN * 300},
    {"min_pixels": TOKEN * 20, "max_pixels": TOKEN * 2000},
    {"min_pixels": TOKEN * 20},
    {"resized_height": 560, "resized_width": 2800},
]


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_of_an_image_beside_its_url_and_in_its_object_are_the_same(sizes):
    inside, beside = image_part("a", **sizes), image_part("a") | sizes
    vendors = {"type": "image", "image": "a"} | sizes
    made = [engine_request(one, image_part("b")) for one in (inside, beside, vendors, beside | {"image_url": "a"})]
    assert made[0] == made[1] == made[2] == made[3]
    item = {"type": "input_image", "image_url": "a", **sizes}
    body = ResponsesRequest(input=[{"role": "user", "content": [item]}])
    chat_body = as_chat(body, messages_of(body.items))
    assert [image.sizes for image in images_of(chat_body.messages)] == [sizes]


def test_an_image_with_sizes_of_its_own_leaves_those_of_others():
    [own, other] = image_parts(made := engine_request(image_part("a") | SIZES[0], image_part("b")))
    assert made["max_pixels"] == other.get("max_pixels", made["max_pixels"]) == 1280 * TOKEN
    assert own["max_pixels"] == 300 * TOKEN
    [own, other] = image_parts(made := engine_request(image_part("a") | SIZES[1], image_part("b")))
    assert (made["max_pixels"], own["min_pixels"], other["max_pixels"]) == (2000 * TOKEN, 20 * TOKEN, 1280 * TOKEN)
    [own, other] = image_parts(made := engine_request(image_part("a") | SIZES[3], image_part("b")))
    assert made["max_pixels"] == 16384 * TOKEN and other["max_pixels"] == 1280 * TOKEN
    assert (own["resized_height"], own["resized_width"], own.get("max_pixels")) == (560, 2800, None)


@pytest.mark.parametrize(
    ("sizes", "param", "words"),
    [
        ({"max_pixels": 16385 * TOKEN}, "max_pixels", "must be at most"),
        ({"min_pixels": 16385 * TOKEN}, "min_pixels", "must be at most"),
        ({"min_pixels": 1281 * TOKEN}, "min_pixels", "that detail and max_pixels allow"),
        ({"min_pixels": 400, "max_pixels": 300}, "min_pixels", "that detail and max_pixels allow"),
        ({"resized_height": 10**5, "resized_width": 10**5}, "resized_height", "must be at most"),
    ],
)
def test_sizes_of_an_image_are_bounded(sizes, param, words):
    with pytest.raises(ApiError) as refused:
        engine_request("Hi", image_part("a") | sizes)
    assert (refused.value.param, words in refused.value.detail) == (f"messages[0].content[1].{param}", True)


@pytest.mark.parametrize(
    ("inside", "beside"), [({"max_pixels": 800}, {"max_pixels": 900}), ({"resized_width": 56}, {})]
)
def test_sizes_that_contradict_each_other_are_refused(inside, beside):
    with pytest.raises((ApiError, ValidationError), match=r"given twice|must be given together"):
        engine_request(image_part("a", **inside) | beside)


def test_one_of_two_names_of_a_source_may_be_null():
    want = engine_request(image_part("a"))
    for part in (image_part("a") | {"image": None}, {"type": "image", "image": "a", "image_url": None}):
        assert engine_request(part) == want
    with pytest.raises(ValidationError, match="image"):
        engine_request(image_part("a") | {"image": "b"})


def test_frames_are_counted_without_making_their_urls():
    body = ChatRequest(**chat({"type": "video", "video": "data:video/jpeg;base64," + "," * 10**6}))
    [video] = videos_of(body.messages)
    assert (video.num_frames, video.has_frames) == (10**6 + 1, True)


def test_a_list_of_frames_and_options_of_a_video():
    urls = ["data:image/jpeg;base64,AA", "data:image/jpeg;base64,BB"]
    vendors = {"type": "video", "video": urls, "fps": 2, "max_pixels": 9000}
    inside = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AA,BB", "fps": 2, "max_pixels": 9000}}
    made = [videos_of(ChatRequest(**chat(one)).messages)[0] for one in (vendors, inside)]
    assert made[0].frames == made[1].frames == urls and made[0].has_frames and made[1].has_frames
    assert made[0].options == made[1].options == {"fps": 2, "max_pixels": 9000}


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
    assert [image.param for image in images_of(body.messages)] == [
        "messages[1].content[1].image_url.url",
        "messages[3].content[0].image_url.url",
    ]
    made = chat_request(body, [b"1", b"2"], max_pixels(body))["messages"]
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


def test_incomplete_utf8_is_shown_as_bytes():
    data = "é".encode()
    assert [token_name(5, one, by_id=False) for one in (data, data[:1])] == ["é", "bytes:\\xc3"]
    assert token_name(5, data, by_id=True) == "token_id:5"


def test_one_detail_gives_the_same_input_as_max_pixels_of_the_request(engine):
    """Only images with a smaller limit than others in the request are resized twice."""
    process = engine._preparer.processor
    image = Image.effect_noise((300, 200), 90).convert("RGB")
    body = request(image_part("x", detail="low"), "Hi")
    limits = DetailLimits.of(engine.image_config, 28 * 28 * 30)
    made = process(chat_request(body, [image], max_pixels(body, limits)))
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Hi"}]}]
    reference = process({"messages": messages, "max_pixels": 28 * 28 * 30})
    assert made.token_ids == reference.token_ids
    assert digests_of(made) == digests_of(reference)
