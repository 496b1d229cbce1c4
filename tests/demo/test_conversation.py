"""Requests to the engine and messages of the page are functions of the turns."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from mmvllm.demo.conversation import (
    Options,
    TokenCounts,
    Turn,
    answer_note,
    boxes_by_file,
    media_in,
    queue_note,
    to_chat,
    to_request,
    turn_at,
    without_tags,
)
from mmvllm.demo.images import UploadedImage
from mmvllm.grounding import Box, Point
from mmvllm.outputs import CompletionOutput, RequestOutput
from mmvllm.sampling_params import SamplingParams

A, B, C = (UploadedImage(Path(f"/up/{name}.png"), 100, 80) for name in "abc")
OPTIONS = Options("", 0, 1, 0, 1, 256, -1, 19600, 38416)


def parts(message: dict) -> list:
    return [part.get("text", part.get("image")) for part in message["content"]]


def test_the_request_has_earlier_turns_with_images_and_answers():
    turns = [Turn("What is this?", (A, B), "A star.", "note"), Turn("And there?")]
    request = to_request(turns, OPTIONS)
    first, answer, last = request["messages"]
    assert (parts(first), parts(last)) == ([A, B, "What is this?"], ["And there?"])
    assert answer == {"role": "assistant", "content": "A star."}
    assert (request["min_pixels"], request["max_pixels"]) == (19600, 38416)


def test_images_of_a_turn_without_an_answer_are_added_to_the_next():
    turns = [Turn("Stopped", (A,), "", "Stopped"), Turn("Stopped too", (B,)), Turn("And now?", (C,))]
    assert [parts(message) for message in to_request(turns, OPTIONS)["messages"]] == [[A, B, C, "And now?"]]
    assert media_in(turns) == [A, B, C]


def test_images_keep_their_order_without_repetition():
    turns = [Turn("one", (A,), "1"), Turn("Stopped", (B,)), Turn("two", (), "2"), Turn("three", (C,))]
    one, _, two, _, three = to_request(turns, OPTIONS)["messages"]
    assert [parts(one), parts(two), parts(three)] == [[A, "one"], [B, "two"], [C, "three"]]
    assert media_in(turns) == [A, B, C]


def test_a_system_prompt_comes_first_and_an_empty_one_is_omitted():
    messages = to_request([Turn("Hello")], replace(OPTIONS, system="Be brief."))["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert len(to_request([Turn("Hello")], replace(OPTIONS, system=" \n"))["messages"]) == 1


@pytest.mark.parametrize("seed, want", [(-1, None), (None, None), (0, 0), (7, 7)])
def test_the_controls_become_sampling_params(seed, want):
    params = Options("", 0.5, 0.9, 7, 1.1, 99, seed, 1, 2).sampling_params({})
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.1, "max_tokens": 99}
    assert params == SamplingParams(**given, seed=want)


def test_the_checkpoint_decides_only_what_has_no_control():
    own = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "min_p": 0.1}
    assert OPTIONS.sampling_params(own) == SamplingParams(min_p=0.1)


def test_every_message_of_the_chat_belongs_to_a_turn():
    turns = [Turn("one", (A, B), "1"), Turn("two", (), "2"), Turn("three", (A,), "3")]
    shown = []
    for number, message in enumerate(to_chat(turns)):
        content = message["content"] if message["role"] == "user" else message["content"][0]
        shown.append((turn_at(turns, number), content.get("text") or content["path"]))
    first = [(0, str(A.path)), (0, str(B.path)), (0, "one"), (0, "1")]
    assert shown == [*first, (1, "two"), (1, "2"), (2, str(A.path)), (2, "three"), (2, "3")]


@pytest.mark.parametrize("message", [-1, 2, 100])
def test_a_message_index_out_of_range_is_refused(message):
    with pytest.raises(ValueError, match="no longer here"):
        turn_at([Turn("one", (), "1")], message)


def test_a_note_is_escaped():
    note = to_chat([Turn("q", (), "a", "<b>bold</b>")])[1]["content"][1]["text"]
    assert "<b>" not in note and "&lt;b&gt;" in note


def output(reason: str = "eos", tokens: int = 11, first: float | None = 10.5) -> RequestOutput:
    completion = CompletionOutput("text", list(range(tokens)), reason)
    return RequestOutput("id", [completion], 1200, 1000, 84, arrival_time=10, first_token_time=first, finish_time=12.5)


@pytest.mark.parametrize(
    "given, images, videos, note",
    [
        (output(), [], [], "First token after 0.50 s · 5 tokens/s · CACHED"),
        (output(tokens=1), [42], [], "First token after 0.50 s · CACHED · 42 picture tokens"),
        (output(tokens=1), [42, 8], [1000], "First token after 0.50 s · CACHED · 42 + 8 = 50 picture tokens and VIDEO"),
        (
            output("length"),
            [42, 1000],
            [],
            "Cut off at the maximum length · first token after 0.50 s · 5 tokens/s · CACHED · "
            "42 + 1,000 = 1,042 picture tokens",
        ),
        (output("aborted", 0, None), [], [], "Stopped"),
    ],
)
def test_the_note_of_an_answer_has_its_statistics(given, images, videos, note):
    want = note.replace("CACHED", "1,000 of 1,200 prompt tokens cached").replace("VIDEO", "1,000 video tokens")
    assert answer_note(given, TokenCounts(images, videos)) == want


@pytest.mark.parametrize(
    "answer, shown",
    [
        ('<svg><a href="javascript:x()">me</a>', '<\u200bsvg><\u200ba href="javascript:x()">me<\u200b/a>'),
        ("1 < 2, a <b", "1 < 2, a <\u200bb"),
        ("so:\n```html\n<p>hi</p>\n```", "so:\n```html\n<\u200bp>hi<\u200b/p>\n```"),
        ("\\`<p>\\` and `<p>`", "\\`<\u200bp>\\` and `<\u200bp>`"),
        ("<!-- x -->", "<\u200b!-- x -->"),
        ("![i](/logout) ![i]", "!\u200b[i](/logout) !\u200b[i]"),
        ('[a]: /x "t\n```\n"\n<img src=/x>', '[a]: /x "t\n```\n"\n<\u200bimg src=/x>'),
        *(
            (f"{before}mermaid\nA{after}", f"{before}text\nA{after}")
            for before, after in (
                *(("```", "\n```"), ("- ``` ", "\n  ```"), ("> ~~~~", "\n> ~~~~"), ("x\r```", "\r```")),
                *(("\x0b```", ""), ("1. ~~~ {x} ", "\n```")),
            )
        ),
        ("a mermaid\n```text\nmermaid\n```", "a mermaid\n```text\nmermaid\n```"),
    ],
)
def test_html_in_an_answer_is_shown_as_text(answer, shown):
    assert without_tags(answer) == shown


@pytest.mark.parametrize("piece", ["`", "~", "```", "```x\n", "![", "<", "mermaid", "```mermaid"])
def test_a_long_answer_takes_linear_time(piece):
    start = time.process_time()
    assert without_tags(piece * 100_000).count(piece[0]) >= 100_000
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "position, note",
    [(None, "Looking …"), (0, "Looking …"), (1, "Waiting, next in line"), (3, "Waiting, 2 ahead of you")],
)
def test_a_queued_request_shows_its_position(position, note):
    assert queue_note(position) == note


def test_boxes_belong_to_the_files_of_images():
    """A video has none, and does not count."""
    video = object()
    boxes = [Box("star", 1, 0, 0, 4, 4), Point(None, 0, 1, 1), Box(None, 1, 2, 2, 3, 3)]
    found = boxes_by_file(boxes, [A, video, B])
    assert found == {str(A.path): [boxes[1]], str(B.path): [boxes[0], boxes[2]]}
