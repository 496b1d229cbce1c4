"""Records of conversations that the browser keeps: questions, answers, notes, and the names of uploaded files.

The browser sends a record back after a reload, and when the visitor opens a conversation from the list. Records are
untrusted, like all content of the page: `read_turns` raises ValueError if one is malformed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmvllm.demo.conversation import Turn, Uploaded, media_in
from mmvllm.demo.events import MAX_CHARACTERS, MAX_FILES, RELOAD
from mmvllm.demo.videos import UploadedVideo

MAX_TURNS = 500
MAX_NOTE = 300  # characters, each of which may become six when shown; longer notes are cut
MAX_BOXES = 100  # drawn on one image
MAX_STRIP_CHARACTERS = 2**20  # of the frames of all videos; frames of earlier videos are left out
INTERRUPTED = "Stopped"  # the note of an answer that was unfinished when the visitor left the page


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn of a record, whose files have not been looked up yet."""

    question: str
    answer: str
    note: str
    media: tuple[str, ...]

    def found(self, find: Callable[[str], Uploaded | None]) -> Turn:
        """Return the turn with the files that `find` returns; missing files are left out."""
        media = tuple(one for one in map(find, self.media) if one is not None)
        return Turn(self.question, media, self.answer, self.note or INTERRUPTED)


def to_record(turns: Sequence[Turn], missing: Sequence[str] = ()) -> str:
    """Return JSON without `<`, since gradio inserts it into a page; `missing` names files that the browser must send.

    The key "images" also holds videos, since browsers keep records from when there were only images. Browsers that
    cannot play a video show its frames, up to `MAX_STRIP_CHARACTERS`. The boxes of an image come from the last answer
    that has any; the browser does not keep them.
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
    """Return the frames of the latest videos that fit into `MAX_STRIP_CHARACTERS`, by file path."""
    strips, left = {}, MAX_STRIP_CHARACTERS
    for one in reversed(media_in(turns)):
        if isinstance(one, UploadedVideo) and (name := str(one.path)) not in strips:
            left -= sum(len(frame) for _, frame in one.strip)
            if left < 0:
                break
            strips[name] = [*map(list, one.strip)]
    return strips


def _drawn(turns: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    """Return the size, the boxes and the points of each image, by file path."""
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
    """Raise ValueError if a conversation is too long to continue."""
    num_characters = sum(len(turn.question) + len(turn.answer) for turn in turns)
    num_files = sum(len(turn.media) for turn in turns)
    if len(turns) > MAX_TURNS or num_characters > MAX_CHARACTERS or num_files > MAX_FILES:
        raise ValueError("The conversation is too long to go on; start a new conversation")


def read_turns(value: Any, max_files: int) -> list[KeptTurn]:
    """Return the turns of a record from the browser; each may have at most `max_files` files."""
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
