"""A conversation as the browser keeps it: questions, answers, notes, and the names of uploaded images.

The browser sends it back after a reload, and when a conversation from its list is opened. As any content of the page it
is untrusted: `read_turns` raises ValueError if it is malformed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmvllm.demo.conversation import Turn
from mmvllm.demo.events import RELOAD
from mmvllm.demo.images import UploadedImage

MAX_TURNS = 500
INTERRUPTED = "Stopped"  # the note of an answer that was still being written when the page was left


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn whose images are not looked up yet."""

    question: str
    answer: str
    note: str
    images: tuple[str, ...]

    def found(self, find: Callable[[str], UploadedImage | None]) -> Turn:
        """The turn, without the images that `find` does not find."""
        images = tuple(image for image in map(find, self.images) if image is not None)
        return Turn(self.question, images, self.answer, self.note or INTERRUPTED)


def to_record(turns: Sequence[Turn], missing: Sequence[str] = ()) -> str:
    """JSON without `<`, since gradio inserts it into a page; `missing` names images that the browser has to send."""
    kept = [
        {
            "question": turn.question,
            "answer": turn.answer,
            "note": turn.note if turn.answer else "",
            "images": [str(image.path) for image in turn.images],
        }
        for turn in turns
    ]
    return json.dumps({"turns": kept, "missing": [*missing]}).replace("<", "\\u003c")


def read_turns(value: Any, max_images: int) -> list[KeptTurn]:
    """The turns of a record that the browser has kept, with at most `max_images` each."""
    if not isinstance(value, list) or len(value) > MAX_TURNS:
        raise ValueError(RELOAD)
    turns = [_read_turn(turn) for turn in value]
    if any(len(turn.images) > max_images for turn in turns):
        raise ValueError(RELOAD)
    return turns


def _read_turn(turn: Any) -> KeptTurn:
    if not isinstance(turn, dict):
        raise ValueError(RELOAD)
    texts, images = [turn.get(name) for name in ("question", "answer", "note")], turn.get("images")
    if not isinstance(images, list) or not all(isinstance(value, str) for value in (*texts, *images)):
        raise ValueError(RELOAD)
    return KeptTurn(*texts, tuple(images))
