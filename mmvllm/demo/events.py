"""Parses events of the page. Their content is untrusted; all functions raise ValueError if it is malformed."""

from typing import Any, NamedTuple

import gradio as gr

from mmvllm.utils.text import parse_json

MAX_CHARACTERS = 2**18  # of a conversation before its next answer; it must fit into one event of the page
MAX_FILES = 200  # of a conversation; every update of the page lists all of them
RELOAD = "the page sent something that cannot be read; reload it"


def read_draft(draft: Any) -> tuple[str, list[str]]:
    """Return the text and the file paths in the message box."""
    if not isinstance(draft, dict) or not isinstance(draft.get("text"), str):
        raise ValueError(RELOAD)
    return _short(draft["text"]), read_files(draft.get("files"))


def read_files(files: Any) -> list[str]:
    """Return the paths of uploaded files."""
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise ValueError(RELOAD)
    return _strings([file.get("path") for file in files])


def read_paths(text: Any) -> list[str]:
    """Return the paths in a JSON list."""
    try:
        return _strings(parse_json(text))
    except (TypeError, ValueError):
        raise ValueError(RELOAD) from None


def read_index(event: gr.EventData) -> int:
    """Return the index of the message or example that an event refers to."""
    index = _field(event, "index")
    if not isinstance(index, int):
        raise ValueError(RELOAD)
    return index


def read_text(event: gr.EventData) -> str:
    """Return the new text of an edited question."""
    return _short(_strings([_field(event, "value")])[0])


def _short(question: str) -> str:
    if len(question) > MAX_CHARACTERS:
        raise ValueError(f"The question must have at most {MAX_CHARACTERS:,} characters, got {len(question):,}")
    return question


class KeptEvent(NamedTuple):
    """A conversation that the browser has kept and sends back.

    `is_final`: no further files will come; `has_copies`: some images are small copies; `has_lost`: videos are lost.
    """

    turns: Any
    is_final: bool
    has_copies: bool
    has_lost: bool


def read_kept(event: gr.EventData) -> KeptEvent:
    return KeptEvent(_field(event, "turns"), *(_field(event, name) is True for name in ("final", "copies", "lost")))


def _field(event: gr.EventData, name: str) -> Any:
    try:
        return getattr(event, name, None)
    except TypeError:  # the event has no data
        return None


def _strings(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(RELOAD)
    if len(values) > MAX_FILES:
        raise ValueError(RELOAD)
    return values
