"""Bodies that are large: base64 of images and videos is set aside, and the rest may be as large as that of others."""

import base64
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmvllm.server.errors import ApiError
from mmvllm.server.http import body as body_module
from mmvllm.server.http import large_bodies
from mmvllm.server.http.body import parse
from mmvllm.server.http.large_bodies import MIN_LENGTH, set_aside
from tests.helpers.serving.server import CHAT, TOKENIZE, answered, chat, data_uri, image_part
from tests.server.refusals import refusal

MEDIA = base64.b64encode(bytes(range(256)) * 40).decode()


@pytest.fixture
def small_limit(monkeypatch):
    """Every body is a large one, and may have 10,000 bytes of text."""
    monkeypatch.setattr(body_module, "MAX_TEXT_BYTES", 0)
    monkeypatch.setattr(large_bodies, "MAX_TEXT_BYTES", 10_000)


URI = f"data:image/png;base64,{MEDIA}"
FRAMES = ",".join([MEDIA] * 3)
SET_ASIDE = {
    "an image": URI,
    "for URLs": URI.replace("+", "-").replace("/", "_"),
    "with parameters": f"data:video/mp4;codecs=avc1;base64,{MEDIA}",
    "frames": f"data:video/jpeg;base64,{FRAMES}",
    "lines": URI.replace("A", "A\n").replace("B", "B\r\n"),
}


@pytest.mark.parametrize("kind", SET_ASIDE)
@pytest.mark.parametrize("escapes_slashes", [False, True])
def test_base64_is_no_text(kind, escapes_slashes, small_limit):
    value = {"a": [SET_ASIDE[kind], {"b": SET_ASIDE[kind]}, "short"], "c": 'x"y\\'}
    body = json.dumps(value)
    body = body.replace("/", "\\/") if escapes_slashes else body
    assert parse(body.encode()) == value
    assert len(set_aside(body.encode())[0]) < 500


TEXTS = {
    "deletions": "\x7f" * 12_000,
    "words": "a word and " * 1200,
    "capitals": "Σ" * 6000,
    "escapes": "\\u0041" * 2000,
    "a wide character": "a" * 12_000 + "😀",
    "base64 without its header": MEDIA,
    "a URI and a half": URI + "\ud800",
    "a URI and a wide character": URI + "😀",
    "a URI and a backslash": URI + "\\",
    "an escaped backslash in a URI": URI.replace("A", "\\n"),
    "a URI behind a quotation mark": f'"{URI}',
    "a URI with a space": f"{URI} {MEDIA}",
    "a URI without an end": "data:" + "a" * 12_000 + ";",
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_all_else_is_text(kind, ascii_only, small_limit):
    text = TEXTS[kind]
    body = f'{{"a": "{text}"}}' if kind == "escapes" else json.dumps({"a": text}, ensure_ascii=ascii_only)
    with pytest.raises(ApiError, match="more than 10000 bytes outside data URIs") as refused:
        parse(body.encode(errors="surrogatepass"))
    assert refused.value.status_code == 413


@pytest.mark.parametrize("space", ["", " ", "\n\t ", " " * 100])
def test_a_key_is_text(space, small_limit):
    with pytest.raises(ApiError, match="bytes outside data URIs"):
        parse(f'{{"{URI}"{space}: 1}}'.encode())


@pytest.mark.parametrize("character", ["\n", "\r", "\t", "\x00"])
def test_a_line_break_in_a_string_is_no_json(character, small_limit):
    with pytest.raises(ApiError):
        parse(f'{{"a": "{URI}{character}{MEDIA}"}}'.encode())


def test_quotation_marks_are_counted_before_the_body_is_split(small_limit):
    with pytest.raises(ApiError, match="at most 4000000 quotation marks"):
        parse(b'"' * 4_000_001)


PIECES = st.sampled_from([URI, URI[:MIN_LENGTH], URI[: MIN_LENGTH - 1], MEDIA, *'"\\/é😀:,{ '])
STRINGS = st.lists(PIECES, max_size=3).map("".join)
VALUES = st.recursive(
    STRINGS | st.integers() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_what_is_parsed_is_what_the_body_says(value, ascii_only, indent):
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    rest, strings = set_aside(body)
    assert large_bodies.restored(json.loads(rest), strings) == value


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join), st.data())
def test_what_is_no_json_stays_none(text, data):
    rest, strings = set_aside(text.encode())
    for one in (text, rest.decode()):
        try:
            read = json.loads(one)
        except ValueError:
            read = None
        assert large_bodies.restored(read, strings) == (None if read is None else json.loads(text))


@pytest.mark.spawns
def test_a_request_with_large_images_is_answered(app, small_limit):
    answered(app, CHAT, chat(image_part(data_uri()), max_tokens=1))
    assert "bytes outside data URIs" in refusal(app, TOKENIZE, {"prompt": "two words " * 2000}, 413)["message"]


def test_base64_of_many_megabytes_takes_no_seconds():
    body = b'{"a": "data:video/mp4;base64,%s", "b": "\xf0\x9f\x98\x80"}' % (b"A" * 100_000_000)
    begin = time.thread_time()
    assert len(parse(body)["a"]) == 100_000_022
    assert time.thread_time() - begin < 2
