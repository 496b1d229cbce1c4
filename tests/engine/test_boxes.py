"""Boxes and points in completions: the three formats, places in the image, and text that is malformed."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mmvllm.engine import boxes
from mmvllm.engine.boxes import MAX_FAILURES, BoxReader, Written, objects_in, spans_in
from mmvllm.grounding import Box, BoxFormat, ImageGeometry, Point
from mmvllm.inputs import MultiModalItem, PlaceholderRange
from mmvllm.models.folder import BUNDLED
from mmvllm.models.registry import FAMILIES, family_of

TOKENS, PIXELS, THOUSANDTHS = BoxFormat("tokens", 1000), BoxFormat("json"), BoxFormat("json", 1000)
KITE = "<|object_ref_start|>a kite<|object_ref_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED)


def item(geometry: ImageGeometry | None, index: int = 0, modality: str = "image") -> MultiModalItem:
    return MultiModalItem(modality, torch.zeros(4, 8), (1, 2, 2), b"", PlaceholderRange(0, 1), index, geometry=geometry)


def read(box_format, text, *items, tokenizer=None):
    token_ids = [] if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = text if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True)
    return BoxReader(tokenizer, box_format).read(shown, token_ids, items)


def shown(boxes) -> list[dict]:
    return json.loads(json.dumps([box.to_dict() for box in boxes]))


def test_every_family_says_how_it_writes_boxes():
    formats = {type(family).__name__: family.boxes for family in map(family_of, FAMILIES)}
    assert formats == {"Qwen2VLFamily": TOKENS, "Qwen25VLFamily": PIXELS, "Qwen3VLFamily": THOUSANDTHS}


def test_boxes_between_special_tokens(tokenizer):
    """They are not in the text, from which special tokens are removed."""
    text = (
        f"Look: {KITE}<|box_start|>(100,200),(500,750)<|box_end|>, <|box_start|>(900,1),(3,40)<|box_end|> and "
        "<|box_start|>( 250 , 500 )<|box_end|> then "
        "<|object_ref_start|>a sign<|object_ref_end|><|quad_start|>(0,0),(10,1),(11,9),(1,10)<|quad_end|>"
    )
    boxes = read(TOKENS, text, item(ImageGeometry(2000, 1000, 56, 28)), tokenizer=tokenizer)
    assert shown(boxes) == [
        {"label": "a kite", "image": 0, "box": [200, 200, 1000, 750]},
        {"label": "a kite", "image": 0, "box": [6, 1, 1800, 40]},  # its corners are ordered
        {"label": None, "image": 0, "point": [500, 500]},
        {"label": "a sign", "image": 0, "box": [0, 0, 22, 10], "quad": [[0, 0], [20, 1], [22, 9], [2, 10]]},
    ]
    assert read(TOKENS, text.replace("<|", "<"), item(ImageGeometry(9, 9, 9, 9)), tokenizer=tokenizer) == ()


def test_boxes_in_json():
    made = [{"bbox_2d": [28, 14, 56, 280], "label": "cat"}, {"point_2d": [7.5, 14], "label": 'a "dog" {1}'}]
    text = f"Here:\n```json\n{json.dumps(made, indent=1)}\n```\nand {{'bbox_2d': [1, 2, 3, 4]}} but nested: "
    text += json.dumps({"all": [{"bbox_2d": [0, 0, 9999, 1], "text_content": "EXIT", "of": {"color": [1]}}]})
    geometry = ImageGeometry(200, 100, 56, 28)
    assert shown(read(PIXELS, text, item(geometry))) == [
        {"label": "cat", "image": 0, "box": [100, 50, 200, 100]},  # clipped to the image
        {"label": 'a "dog" {1}', "image": 0, "point": [26.79, 50]},
        {"label": "EXIT", "image": 0, "box": [0, 0, 200, 3.57]},
    ]
    assert shown(read(THOUSANDTHS, text, item(geometry)))[0]["box"] == [5.6, 1.4, 11.2, 28]


def test_a_list_that_was_cut_off_gives_what_is_complete():
    text = (
        '```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "a"},\n{"bbox_2d": [5, 6, 7, 8], "label": "b"},\n{"bbox_2d": [9,'
    )
    assert [one.label for one in objects_in(text)] == ["a", "b"]
    cut = f"{KITE}<|box_start|>(1,2),(3,4)<|box_end|>{KITE}<|box_start|>(1,2),(3"
    assert [*spans_in(cut)] == [Written("a kite", ((1, 2), (3, 4)))]


@pytest.mark.parametrize(
    "text",
    [
        '{"bbox_2d": [1, 2, 3], "label": "x"}',
        '{"bbox_2d": [1, 2, 3, "4"]}',
        '{"bbox_2d": [1, 2, 3, true]}',
        '{"bbox_2d": [1, 2, 3, NaN]}',
        '{"bbox_2d": [1, 2, 3, 1e400]}',
        '{"bbox_2d": [[1, 2], [3, 4]]}',
        '{"point_2d": {"x": 1, "y": 2}}',
        '"bbox_2d": [1, 2, 3, 4]',
        "<|box_start|>(1,2),(3,4),(5,6)<|box_end|>",
        "<|box_start|>(1,2)(3,4<|box_end|>",
        "<|box_start|>1,2,3,4<|box_end|>",
        "<|box_start|>(1,2),(3,4)<|quad_end|>",
        "<|box_start|><|box_end|>",
    ],
)
def test_what_is_malformed_gives_none(text):
    assert [*objects_in(text), *spans_in(text)] == []


HOSTILE = [
    '{"a":',
    '{"',
    "[{",
    "{{",
    '{"bbox_2d":[',
    "<|box_start|>",
    "<|object_ref_start|>",
    "(1,1)",
    " ",
    "<",
    '{"a":[{},',
]


@pytest.mark.slow
@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_texts_are_read_in_linear_time(piece):
    """These would take minutes in quadratic time."""
    for text in (piece * 20_000, "<|box_start|>" + piece * 20_000 + "<|box_end|>"):
        assert [*objects_in(text)] == [] and len([*spans_in(text)]) <= 1


BOX = '{"bbox_2d": [1, 2, 3, 4]}'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"a":[' * 300 + '"', "x" * 100_000),
        ('{"a":[' * 300, "{}," * 30_000),
        ('{"a":[' * 2000, "{}," * 30_000),
        ('{"a":[' * 300, "1" * 100_000),
        ("", "{" * 300_000),
        ("", '{"a":1,}' * 40_000),
        ("日" * 1000, "{日" * 100_000),
    ],
)
def test_what_is_parsed_in_vain_is_bounded_however_it_fails(before, after, monkeypatch):
    """Each place that begins an object may cost a walk through the rest of the text, and the parser is fast."""
    monkeypatch.setattr(boxes, "MAX_WASTED", 0)  # leaves four times the text
    calls, decode = [], json.JSONDecoder.raw_decode
    monkeypatch.setattr(json.JSONDecoder, "raw_decode", lambda *args: calls.append(args[2]) or decode(*args))
    assert [*objects_in(before + after)] == [] and len(calls) <= (5 if len(before) > 1000 else MAX_FAILURES)
    assert len([*objects_in(f"{BOX} {{cut")]) == 1


def test_boxes_may_be_nested_deeply():
    text = f'{BOX[:-1]}, "in": ' * 400 + f"[{BOX}, {BOX}]" + "}" * 400
    assert len([*objects_in(text)]) == 402


PIECES = st.sampled_from(
    [*HOSTILE, '"bbox_2d"', '"label"', ":", ",", "]", "}", "[1,2,3,4]", "-5", "1e999", "\ud83e\udda9", "null"]
)


@settings(max_examples=150)
@given(st.lists(PIECES | st.text(max_size=4), max_size=30).map("".join))
def test_any_text_gives_boxes_or_none(text):
    for one in (*objects_in(text), *spans_in(text)):
        assert len(one.pairs) in (1, 2, 4) and isinstance(one.label, str | None)


SIDES = st.integers(1, 4000)


@settings(max_examples=200)
@given(SIDES, SIDES, st.integers(1, 60), st.integers(1, 60), st.data())
def test_boxes_come_back_to_their_pixels(width, height, columns, rows, data):
    """What a perfect model writes for a box is within a pixel of it, and within the precision of its coordinates."""
    geometry = ImageGeometry(width, height, columns * 28, rows * 28)
    x1, x2 = sorted(data.draw(st.tuples(st.integers(0, width), st.integers(0, width))))
    y1, y2 = sorted(data.draw(st.tuples(st.integers(0, height), st.integers(0, height))))
    for box_format in (TOKENS, PIXELS, THOUSANDTHS):
        across, down = (
            (box_format.scale,) * 2 if box_format.scale else (geometry.resized_width, geometry.resized_height)
        )
        model = [
            round(x1 * across / width),
            round(y1 * down / height),
            round(x2 * across / width),
            round(y2 * down / height),
        ]
        if box_format.syntax == "json":
            (written,) = objects_in(json.dumps([{"bbox_2d": model}]))
        else:
            (written,) = spans_in("<|box_start|>({},{}),({},{})<|box_end|>".format(*model))
        (x1_, y1_), (x2_, y2_) = (geometry.place(*pair, box_format.scale) for pair in written.pairs)
        assert 0 <= x1_ <= x2_ <= width and 0 <= y1_ <= y2_ <= height
        for got, want, size, steps in (
            (x1_, x1, width, across),
            (x2_, x2, width, across),
            (y1_, y1, height, down),
            (y2_, y2, height, down),
        ):
            assert abs(got - want) <= max(1, size / steps)


def test_several_images_need_an_index():
    """A box says nothing of its image; a JSON object may name it."""
    items = [item(ImageGeometry(100, 100, 28, 28)), item(ImageGeometry(10, 10, 28, 28), 1), item(None, 0, "video")]
    named = ', "image": 1, "label": "b"'
    text = (
        f'[{{"bbox_2d": [0, 0, 500, 500]}}, {{"bbox_2d": [0, 0, 500, 500]{named}}}, {{"point_2d": [1, 1], "image": 7}}]'
    )
    assert read(THOUSANDTHS, text, *items) == (Box("b", 1, 0, 0, 5, 5),)
    assert len(read(THOUSANDTHS, text, items[0])) == 3 and read(THOUSANDTHS, text, items[2]) == ()
    assert (
        read(THOUSANDTHS, text, item(None)) == () and read(THOUSANDTHS, text) == () and read(None, text, items[0]) == ()
    )


def test_points_and_boxes_in_stored_pixels():
    turned = ImageGeometry(40, 100, 28, 56, orientation=6)
    box = Box("a", 0, 1, 2, 10, 30, None, turned)
    assert (
        box.in_stored_pixels() == Box("a", 0, 2, 30, 30, 39) and box.in_stored_pixels().in_stored_pixels() is not None
    )
    assert box.in_stored_pixels().geometry == ImageGeometry(100, 40, 56, 28)
    assert Point("a", 0, 1, 2, turned).in_stored_pixels() == Point("a", 0, 2, 39)
    quad = Box("a", 0, 0, 0, 4, 4, ((0, 0), (4, 0), (4, 4), (0, 4)), turned).in_stored_pixels()
    assert quad.quad == ((0, 40), (0, 36), (4, 36), (4, 40)) and (quad.x1, quad.y1, quad.x2, quad.y2) == (0, 36, 4, 40)
