"""Images and videos that a client has named once need not be sent again, as in vLLM; nobody else gets them."""

import pytest

from mmvllm.server.common import media
from mmvllm.server.common.media import MediaStore
from tests.helpers.media.videos import make_clip
from tests.helpers.serving.server import CHAT, SCENES, answered, call, chat, data_uri, image_part, make_app, video_uri
from tests.server.refusals import refusal

IMAGE = data_uri(SCENES[4])


def asked(*parts, **keys) -> dict:
    return chat("Describe it.", *parts, max_tokens=16, temperature=0, **keys)


def text_of(app, *parts, **keys) -> str:
    return answered(app, CHAT, asked(*parts, **keys))["choices"][0]["message"]["content"]


def by_name(uuid: str, **keys) -> dict:
    return {"type": "image_url", "uuid": uuid, **keys}


@pytest.mark.spawns
@pytest.mark.parametrize("form", [{}, {"image_url": None}, {"image_url": {}}, {"image_url": {"url": None}}])
def test_an_image_is_named_once(form, app):
    expected = text_of(app, image_part(IMAGE))
    other = text_of(app, image_part(data_uri(SCENES[0])))
    assert expected != other
    assert text_of(app, image_part(IMAGE), by_name("four", image_url={"url": IMAGE})) == text_of(
        app, image_part(IMAGE), image_part(IMAGE)
    )
    assert text_of(app, by_name("four", **form)) == expected
    assert text_of(app, by_name("four", image_url={"url": data_uri(SCENES[0])})) == other
    assert text_of(app, by_name("four", **form)) == other  # what was named last


@pytest.mark.spawns
def test_options_stand_beside_the_name(app):
    small = {"max_pixels": 28 * 28 * 4}
    expected = text_of(app, image_part(IMAGE, **small))
    assert text_of(app, by_name("sized", image_url={"url": IMAGE})) != expected
    assert text_of(app, by_name("sized", image_url={"detail": "low"}, **small)) == expected


@pytest.mark.spawns
def test_an_image_may_be_named_and_shown_again_in_one_request(app):
    assert text_of(app, by_name("both", image_url={"url": IMAGE}), by_name("both")) == text_of(
        app, image_part(IMAGE), image_part(IMAGE)
    )


@pytest.mark.spawns
def test_images_that_are_kept_count_with_the_bytes_of_requests(engine):
    app = make_app(engine, max_bodies_bytes=2 * len(IMAGE) + 1000)
    text_of(app, by_name("a", image_url={"url": IMAGE}))
    assert refusal(app, CHAT, asked(*[by_name("a")] * 5), 429)["code"] == "engine_busy"


@pytest.mark.spawns
def test_a_video_is_named_once(app, tmp_path):
    named = {"type": "video_url", "uuid": "clip"}
    uri = video_uri(make_clip(tmp_path / "a.mp4", 24))
    expected = text_of(app, {**named, "video_url": {"url": uri}})
    assert text_of(app, named) == text_of(app, {**named, "video_url": {"fps": 2.0}}) == expected
    frames = "data:video/jpeg;base64," + ",".join([data_uri(SCENES[1]).partition(",")[2]] * 4)
    expected = text_of(app, {**named, "uuid": "frames", "video_url": {"url": frames}})
    assert text_of(app, {**named, "uuid": "frames"}) == expected
    assert refusal(app, CHAT, asked(by_name("clip")))["param"] == "messages[0].content[1].uuid"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "messages[0].content[1].image_url"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[1].image_url.url"),
        ({"type": "video_url", "video_url": {"fps": 1.0}}, "messages[0].content[1].video_url.url"),
        *((by_name(uuid), "messages[0].content[1].uuid") for uuid in ("nosuch", "", "a" * 257)),
    ],
)
def test_what_is_not_there_is_named(part, param, app):
    assert refusal(app, CHAT, asked(part))["param"] == param


@pytest.mark.spawns
def test_names_belong_to_one_key_and_one_salt(engine):
    app = make_app(engine, api_keys=("one", "two"))

    def status(part: dict, key: str = "one", **keys) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return call(app, "POST", CHAT, json=asked(part, **keys), headers=headers).status_code

    assert status(by_name("a", image_url={"url": IMAGE}), cache_salt="x") == 200
    assert status(by_name("a"), cache_salt="x") == 200
    assert status(by_name("a"), "two", cache_salt="x") == 400
    assert status(by_name("a"), cache_salt="y") == status(by_name("a")) == 400


@pytest.mark.spawns
def test_nothing_is_kept_where_that_is_switched_off(engine):
    app = make_app(engine, max_kept_media_bytes=0)
    text_of(app, by_name("a", image_url={"url": IMAGE}))
    refusal(app, CHAT, asked(by_name("a")))


def test_names_and_small_images_take_memory_too():
    """Otherwise images of a few bytes with names of a thousand would take gigabytes."""
    store = MediaStore(100_000)
    for number in range(2000):
        store.keep(f"{number}" * 250, b"")
    kept = sum(store.get(f"{number}" * 250) is not None for number in range(2000))
    assert 300 < kept <= 100_000 / media.STORE_OVERHEAD
    store.keep("frames", [b"x"] * 50)
    assert store.get("frames") is not None
    store.keep("frames", [b"x"] * 100)  # of more than a quarter
    assert store.get("frames") is None


def test_what_was_not_used_for_the_longest_time_goes_first(monkeypatch):
    monkeypatch.setattr(media, "STORE_OVERHEAD", 0)
    store = MediaStore(40)
    for name in "abcd":
        store.keep(name, bytes(10))
    assert store.get("a") == bytes(10)
    store.keep("e", [bytes(4), bytes(6)])
    assert [name for name in "abcde" if store.get(name) is not None] == ["a", "c", "d", "e"]
    store.keep("a", bytes(40 // media.LARGEST_STORED_SHARE + 1))  # too large to be kept
    assert [name for name in "acde" if store.get(name) is not None] == ["c", "d", "e"]
    store.keep("f", b"")
    store.keep("c", bytes(10))
    assert [name for name in "cdef" if store.get(name) is not None] == ["c", "d", "e", "f"]
