"""Requests in every form are parsed into messages and image parts, or there is a RequestError."""

import json
import re

import numpy as np
import pytest

from mmvllm.processors.chat.requests import parse_request
from mmvllm.server.common.protocol import ProcessorKwargs
from tests.helpers.engine.requests import noise_image, text, user

BARE = {"type": "image"}
A, B, C = noise_image(200, 120, 1), noise_image(133, 260, 2), noise_image(180, 180, 3)


FORMS = {
    "string": ({"messages": [{"role": "user", "content": "hi"}]}, ["hi"], []),
    "text part": (user(text("hi")), [[text("hi")]], []),
    "text shorthand": (user({"text": "hi"}), [[text("hi")]], []),
    "no parts": (user(), [[]], []),
    "image": (user({"type": "image", "image": "a.png"}), [[{"type": "image"}]], ["a.png"]),
    "image shorthand": (user({"image": "a.png"}), [[{"type": "image"}]], ["a.png"]),
    "image_url string": (user({"type": "image_url", "image_url": "a.png"}), [[{"type": "image"}]], ["a.png"]),
    "image_url dict": (user({"type": "image_url", "image_url": {"url": "a.png"}}), [[{"type": "image"}]], ["a.png"]),
    "image of type image_url": (user({"type": "image", "image_url": "a.png"}), [[{"type": "image"}]], ["a.png"]),
    "tuple of parts": (
        {"messages": ({"role": "user", "content": (text("x"), {"image": 1})},)},
        [[text("x"), {"type": "image"}]],
        [1],
    ),
    "nulls": (
        user(
            {"type": "text", "text": "hi", "image": None, "max_pixels": None},
            {"type": "image", "image": "a.png", "text": None, "image_url": None, "min_pixels": None},
            {"type": None, "image": None, "image_url": None, "text": "shorthand"},
            {"image": None, "image_url": {"url": "b.png"}, "text": None},
        ),
        [[text("hi"), {"type": "image"}, text("shorthand"), {"type": "image"}]],
        ["a.png", "b.png"],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_messages_in_every_form(name):
    request, contents, images = FORMS[name]
    messages, parts, *_ = parse_request(request)
    assert [message["content"] for message in messages] == contents
    assert parts == [{"image": image} for image in images]


SIZES = {"min_pixels": 4000, "max_pixels": 9000, "resized_height": 56, "resized_width": 84, "detail": "low"}
OPTIONS = {"fps": 1, "min_frames": 2, "max_frames": 8, "max_pixels": 9000, "total_pixels": 90000, "video_start": 1.0}


@pytest.mark.parametrize(("kind", "given"), [("image", SIZES), ("video", OPTIONS)])
def test_options_beside_a_url_and_in_its_object_are_the_same(kind, given):
    def parsed(inside: dict, beside: dict) -> list[dict]:
        part = {"type": f"{kind}_url", f"{kind}_url": {"url": "a", **inside}, **beside}
        return getattr(parse_request(user(part)), f"{kind}s")

    for name, value in given.items():
        one = {name: value}
        assert parsed(one, {}) == parsed({}, one) == parsed(one, one) == [{kind: "a", **one}]
        plain = {"type": kind, kind: {"url": "a", **one}, f"{kind}_url": None}
        assert getattr(parse_request(user(plain)), f"{kind}s") == [{kind: "a", **one}]
        with pytest.raises(ValueError, match=f"{kind} 0: {name} is given twice, .*; leave one of them out"):
            parsed(one, {name: "auto" if name == "detail" else value + 1})
    with pytest.raises(ValueError, match=f"{kind} 0: {kind} part has unknown keys speed"):
        parsed({"speed": 2}, {})


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"size": {"shortest_edge": 4, "longest_edge": 9}}, {"min_pixels": 4, "max_pixels": 9}),
        ({"size": {"longest_edge": 9, "shortest_edge": None}, "max_pixels": 9}, {"max_pixels": 9}),
        ({"fps": [2.0]}, {"fps": 2.0}),
        ({"fps": [2.0, 2]}, {"fps": 2.0}),
        ({"fps": []}, {}),
        ({"fps": [1, 2.5]}, {"fps": [1, 2.5]}),
        ({"fps": None, "size": None, "do_sample_frames": None, "unknown": None}, {}),
        ({"do_sample_frames": True}, {"do_sample_frames": True}),
    ],
)
def test_arguments_of_the_vendors_processors(given, plain):
    rates = plain.get("fps")
    each = [{**plain, "fps": rate} for rate in rates] if isinstance(rates, list) else [plain] * 2
    for keys in (given, plain):
        request = {"text": "x", "videos": ["a.mp4", "b.mp4"], "mm_processor_kwargs": keys}
        assert parse_request(request).video_kwargs == each
    assert ProcessorKwargs(**given).model_dump(exclude_none=True) == plain


def test_the_order_of_parts_is_kept_across_messages():
    messages, parts, *_ = parse_request(
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [text("a"), {"image": 1}, {"image": 2}, text("b")], "name": "Kim"},
                {"role": "assistant", "content": [text("c")]},
                {"role": "user", "content": [{"image": 3}, text("d"), {"image": 4}]},
            ]
        }
    )
    image = {"type": "image"}
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("a"), image, image, text("b")], "name": "Kim"},
        {"role": "assistant", "content": [text("c")]},
        {"role": "user", "content": [image, text("d"), image]},
    ]
    assert parts == [{"image": 1}, {"image": 2}, {"image": 3}, {"image": 4}]


@pytest.mark.parametrize(
    "images, parts",
    [
        (None, []),
        ((), []),
        ("a.png", ["a.png"]),
        (b"PNG", [b"PNG"]),
        (["a.png", A], ["a.png", A]),
        ({"image": "a.png"}, ["a.png"]),
        ([{"image_url": {"url": "a.png"}}, {"type": "image", "image": "b.png"}, "c.png"], ["a.png", "b.png", "c.png"]),
    ],
    ids=lambda value: re.sub(" at 0x[0-9A-F]+", "", repr(value)),
)
def test_text_with_images_in_every_form(images, parts):
    assert parse_request({"text": "hi", "images": images})[:2] == (None, [{"image": part} for part in parts])


def test_an_array_as_images_is_one_image():
    array = np.zeros((4, 4, 3), dtype=np.uint8)  # bool(array) raises
    assert parse_request({"text": "hi", "images": array})[1][0]["image"] is array


def test_none_for_an_optional_key_means_absent():
    names = ("min_pixels", "max_pixels", "request_id", "priority", "cache_salt", "sampling_params")
    nothing = dict.fromkeys(names)
    assert parse_request({"text": "hi", "images": None, "messages": None, **nothing})[:2] == (None, [])
    request = {**user(text("hi")), "text": None, "images": None, **nothing}
    assert parse_request(request) == parse_request(user(text("hi")))
    assert parse_request({**user({"image": 1}), "images": []})[1] == [{"image": 1}]


def test_the_request_is_never_modified():
    request = user({"type": "image", "image": "a.png", "max_pixels": 9}, text("hi"))
    before = json.dumps(request)
    parse_request(request)
    assert json.dumps(request) == before


ONE_FORM = "a request needs exactly one of 'messages', 'text', 'prompt' and 'prompt_token_ids'; this one has"
BAD = {
    "not a dict": ("hi", "a request must be a dict with 'messages' or 'text', got str"),
    "unknown keys": (
        {"text": "x", "image": A, 7: 8},
        "request has unknown keys 7, image; known: add_generation_prompt, ",
    ),
    "neither": ({}, f"{ONE_FORM} none$"),
    "both": ({**user(), "text": "x"}, f"{ONE_FORM} 'messages' and 'text'$"),
    "messages without the user's": (
        {"messages": [{"role": "system", "content": "x"}], "images": [A]},
        r"messages have 0 parts \{'type': 'image'\} without a source, and 1 image beside them; give one for each part",
    ),
    "messages with a part too many": ({**user(BARE, BARE), "images": A}, r"2 parts \{'type': 'image'\} .* 1 image"),
    "messages with another kind": ({**user({"type": "video"}), "images": A}, r"0 parts \{'type': 'image'\} .* 1 image"),
    "messages that are no list": ({"messages": "hi", "images": [A]}, "'messages' must be a list of at least one"),
    "text of parts": ({"text": [text("x")]}, "'text' must be a string, got list"),
    "messages null": ({"messages": None}, "'messages' must be a list of at least one .*, got None"),
    "messages empty": ({"messages": []}, r"'messages' must be a list of at least one .*, got \[\]"),
    "message string": ({"messages": ["hi"]}, "a message must be a dict with 'role' and 'content', got 'hi'"),
    "role null": ({"messages": [{"role": None, "content": "x"}]}, "must be a dict with 'role' and 'content'"),
    "no content": ({"messages": [{"role": "user"}]}, "a message must be a dict with 'role' and 'content', got {'role'"),
    "content null": (
        {"messages": [{"role": "user", "content": None}]},
        "message content must be a string or a list of parts, got NoneType",
    ),
    "part list": (user(["hi"]), "a content part must be a dict or a string, got list"),
    "empty part": (
        user({}),
        r"a content part must be text, image, image_url, video or video_url, not None with keys \[\]",
    ),
    "unknown type": (
        user({"type": "input_audio", "input_audio": {}}),
        r"video or video_url, not 'input_audio' with keys \['input_audio', 'type'\]",
    ),
    "type that is not a string": (
        user({"type": ["text"], 3: 4}),
        r"video_url, not \['text'\] with keys \['3', 'type'\]",
    ),
    "video without a source": (
        user({"type": "video", "fps": 2}),
        "video 0: a video part needs 'video', or 'video_url'",
    ),
    "video with a key of images": (
        user({"video": "a.mp4", "detail": "low"}),
        "video 0: video part has unknown keys det",
    ),
    "video with a rate of zero": (
        user({"video": "a.mp4", "fps": 0}),
        "video 0: fps must be a number from 1e-06.*, got 0",
    ),
    "video with half a frame": (
        user({"video": "a.mp4", "nframes": 1.5}),
        "video 0: nframes must be an integer.*, got 1.5",
    ),
    "video with a start of text": (
        user({"video_url": {"url": "a.mp4"}, "video_start": "1"}),
        "video 0: video_start must be a number of seconds, got '1'",
    ),
    "rate and number of frames": (
        {"text": "x", "mm_processor_kwargs": {"fps": 1, "num_frames": 4}},
        "mm_processor_kwargs has both fps and num_frames",
    ),
    "processor arguments of another kind": (
        {"text": "x", "mm_processor_kwargs": {"do_resize": False}},
        "mm_processor_kwargs has unknown keys do_resize; known: do_sample_frames, fps, jpeg_draft, max_pixels, ",
    ),
    "size of another kind": (
        {"text": "x", "mm_processor_kwargs": {"size": {"height": 5}}},
        "size must be a dict of 'shortest_edge' or 'longest_edge', got {'height': 5}",
    ),
    "size that is no number": (
        {"text": "x", "mm_processor_kwargs": {"size": {"shortest_edge": "a"}}},
        "min_pixels must be an integer.*, got 'a'",
    ),
    "size and another bound": (
        {"text": "x", "mm_processor_kwargs": {"size": {"shortest_edge": 5}, "min_pixels": 6}},
        "size has shortest_edge 5, and min_pixels is 6; leave one of them out",
    ),
    "a rate that no video has": (
        {**user({"video": "a.mp4"}), "mm_processor_kwargs": {"fps": [1, 2.0]}},
        "fps has 2 rates for 1 video; give one, or one for each video",
    ),
    "one of several rates that is none": (
        {"text": "x", "videos": ["a.mp4", "b.mp4"], "mm_processor_kwargs": {"fps": [1, 0]}},
        "fps must be a number from 1e-06.*, got 0",
    ),
    "sampling of another kind": (
        {"text": "x", "mm_processor_kwargs": {"do_sample_frames": 1}},
        "do_sample_frames must be True or False, got 1",
    ),
    "text without text": (user({"type": "text"}), "a text part needs 'text' with a string, not None"),
    "text with image": (
        user({"type": "text", "text": "x", "image": "a.png"}),
        "text part has unknown keys image; known: text, type",
    ),
    "image with text": (
        user({"image": "a.png", "text": "x"}),
        "image 0: image part has unknown keys text; known: base64, detail, image, image_pil, image_url, max_pixels, ",
    ),
    "unknown detail": (
        user({"image_url": {"url": "a.png", "detail": "tiny"}}),
        "image 0: detail must be 'auto', 'low' or 'high', got 'tiny'",
    ),
    "image without image": (user({"type": "image"}), "image 0: an image part needs 'image', or 'image_url' with 'url'"),
    "image null": (user({"type": "image", "image": None}), "image 0: an image part needs 'image'"),
    "url missing": (user({"type": "image_url", "image_url": {}}), "image 0: an image part needs 'image'"),
    "images with a text part": ({"text": "x", "images": [A, text("x")]}, "image 1: image part has unknown keys text"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_request_is_refused_with_the_reason(name):
    request, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        parse_request(request)


@pytest.mark.parametrize("value", [0, -1, 1.5, "100", True, [1], 10**30], ids=repr)
def test_sizes_are_positive_integers(value):
    message = " must be an integer of at least 1 that fits into 64 bits, got "
    for key in ("min_pixels", "max_pixels"):
        with pytest.raises(ValueError, match=key + message):
            parse_request({"text": "x", key: value})
    for key in ("min_pixels", "max_pixels", "resized_height", "resized_width"):
        with pytest.raises(ValueError, match="image 1: " + key + message):
            parse_request(user({"image": 1}, {"image": 2, key: value}))
        with pytest.raises(ValueError, match="image 0: " + key + message):
            parse_request({"text": "x", "images": {"image": 2, key: value}})
