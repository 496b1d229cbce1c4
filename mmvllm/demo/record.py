"""A conversation as the browser keeps it: questions, answers, notes, and the names of uploaded files.

The browser sends it back after a reload, and when a conversation from its list is opened. As any content of the page it
is untrusted: `read_turns` raises ValueError if it is malformed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmvllm.demo.conversation import Turn, Uploaded, media_in
from mmvllm.demo.events import MAX_CHARACTERS, MAX_FILES, RELOAD
from mmvllm.demo.videos import UploadedVideo

MAX_TURNS = 500
MAX_NOTE = 300  # characters, of which each may become six where it is shown; the rest is left out
MAX_BOXES = 100  # drawn on one image
MAX_STRIP_CHARACTERS = 2**20  # of the frames of all videos; the frames of earlier videos are left out
INTERRUPTED = "Stopped"  # the note of an answer that was still being written when the page was left


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn whose files are not looked up yet."""

    question: str
    answer: str
    note: str
    media: tuple[str, ...]

    def found(self, find: Callable[[str], Uploaded | None]) -> Turn:
        """The turn, without the files that `find` does not find."""
        media = tuple(one for one in map(find, self.media) if one is not None)
        return Turn(self.question, media, self.answer, self.note or INTERRUPTED)


def to_record(turns: Sequence[Turn], missing: Sequence[str] = ()) -> str:
    """JSON without `<`, since gradio inserts it into a page; `missing` names files that the browser has to send.

    The files of a turn are under "images", as browsers have kept them since there were images only. Frames of videos
    are shown where a browser cannot play them, up to `MAX_STRIP_CHARACTERS`. Boxes come from the last answer that
    has some about the image; the browser does not keep them.
    """
    kept = [
        {
            "question": turn.question,
            "answer": turn.answer,
            "note": turn.note if turn.answer else "",
            "images": [str(one.path) for one in turn.media],
        }
        for turn in turns
    ]
    record = {"turns": kept, "missing": [*missing], "strips": _strips(turns), "boxes": _drawn(turns)}
    return json.dumps(record).replace("<", "\\u003c")


def _strips(turns: Sequence[Turn]) -> dict[str, list]:
    """The frames of the latest videos, as many as `MAX_STRIP_CHARACTERS` allow, by the names of their files."""
    strips, left = {}, MAX_STRIP_CHARACTERS
    for one in reversed(media_in(turns)):
        if isinstance(one, UploadedVideo) and (name := str(one.path)) not in strips:
            left -= sum(len(frame) for _, frame in one.strip)
            if left < 0:
                break
            strips[name] = [*map(list, one.strip)]
    return strips


def _drawn(turns: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    """By the name of a file the size of its image, and its boxes and points."""
    latest = {name: boxes[:MAX_BOXES] for turn in turns for name, boxes in turn.boxes.items()}
    return {
        name: {
            "width": boxes[0].geometry.width,
            "height": boxes[0].geometry.height,
            "boxes": [box.to_dict() for box in boxes],
        }
        for name, boxes in latest.items()
    }


def check_length(turns: Sequence[Turn]) -> None:
    """Raise ValueError for a conversation that is too long to go on."""
    num_characters = sum(len(turn.question) + len(turn.answer) for turn in turns)
    num_files = sum(len(turn.media) for turn in turns)
    if len(turns) > MAX_TURNS or num_characters > MAX_CHARACTERS or num_files > MAX_FILES:
        raise ValueError("The conversation is too long to go on; start a new conversation")


def read_turns(value: Any, max_files: int) -> list[KeptTurn]:
    """The turns of a record that the browser has kept, with at most `max_files` each."""
    if not isinstance(value, list) or len(value) > MAX_TURNS:
        raise ValueError(RELOAD)
    turns = [_read_turn(turn) for turn in value]
    if sum(len(turn.question) + len(turn.answer) + len(turn.note) for turn in turns) > 2 * MAX_CHARACTERS:
        raise ValueError(RELOAD)
    numbers = [len(turn.media) for turn in turns]
    if max(numbers, default=0) > max_files or sum(numbers) > MAX_FILES:
        raise ValueError(RELOAD)
    return turns


def _read_turn(turn: Any) -> KeptTurn:
    if not isinstance(turn, dict):
        raise ValueError(RELOAD)
    texts, media = [turn.get(name) for name in ("question", "answer", "note")], turn.get("images")
    if not isinstance(media, list) or not all(isinstance(value, str) for value in (*texts, *media)):
        raise ValueError(RELOAD)
    question, answer, note = texts
    return KeptTurn(question, answer, note[:MAX_NOTE], tuple(media))
