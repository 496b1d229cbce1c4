"""Conversations of data sets, with their images and videos beside them, are those with parts."""

import pytest

from mmvllm.processors.chat.requests import parse_request

IMAGE, VIDEO, TEXT = {"type": "image"}, {"type": "video"}, {"type": "text", "text": "Compare."}
SYSTEM, ANSWER = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": [TEXT]}


def user(*content: dict) -> dict:
    return {"role": "user", "content": [*content]}


def image(source: str, **keys) -> dict:
    return {"type": "image", "image": source, **keys}


EQUAL = {
    "not in a list": ([user(IMAGE, TEXT)], {"images": "a"}, [user(image("a"), TEXT)]),
    "in their order": (
        [SYSTEM, user(IMAGE, TEXT, IMAGE), ANSWER, user(IMAGE)],
        {"images": ["a", "b", "c"]},
        [SYSTEM, user(image("a"), TEXT, image("b")), ANSWER, user(image("c"))],
    ),
    "as vLLM has them": ([user(IMAGE)], {"multi_modal_data": {"image": ["a"]}}, [user(image("a"))]),
    "with the nulls of a table": (
        [user({"type": "image", "text": None, "image": None}, {**TEXT, "image": None})],
        {"images": ["a"]},
        [user(image("a"), TEXT)],
    ),
    "with sizes": ([user(IMAGE)], {"images": [image("a", max_pixels=9)]}, [user(image("a", max_pixels=9))]),
    "beside images of their own": (
        [user(image("own"), IMAGE, TEXT)],
        {"images": ["a"]},
        [user(image("own"), image("a"), TEXT)],
    ),
    "no part": ([SYSTEM, user(TEXT), user(TEXT)], {"images": "a"}, [SYSTEM, user(image("a"), TEXT), user(TEXT)]),
    "no part, as a string": (
        [{"role": "user", "content": "Compare."}],
        {"images": ["a", "b"]},
        [user(image("a"), image("b"), TEXT)],
    ),
    "videos": (
        [user(VIDEO, IMAGE, TEXT)],
        {"images": "a", "videos": ["v"]},
        [user({"type": "video", "video": "v"}, image("a"), TEXT)],
    ),
    "videos, no part": (
        [user(TEXT)],
        {"videos": ["v"], "images": ["a"]},
        [user(image("a"), {"type": "video", "video": "v"}, TEXT)],
    ),
}


@pytest.mark.parametrize(("messages", "beside", "inside"), EQUAL.values(), ids=EQUAL)
def test_media_beside_messages_are_those_of_the_parts(messages, beside, inside):
    given = {"messages": messages, **beside}
    before = repr(given)
    assert parse_request(given) == parse_request({"messages": inside}) and repr(given) == before


def test_a_sample_of_a_data_set_is_answered_as_with_parts(shared_llm):
    path, params = "examples/images/scene-04.png", {"max_tokens": 8}
    beside = {"messages": [user(IMAGE, TEXT)], "images": [path]}
    outputs = shared_llm.generate_multimodal([beside, {"messages": [user(image(path), TEXT)]}], params)
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids and outputs[0].num_image_tokens > 0
    assert outputs[0].text == outputs[1].text
