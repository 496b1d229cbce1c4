"""What an event of the page says, checked: anybody can send anything. All raise ValueError."""

import json
from typing import Any

import gradio as gr

RELOAD = "the page sent something that cannot be read; load it anew"


def read_draft(draft: Any) -> tuple[str, list[str]]:
    """The text in the message box, and the paths of the pictures there."""
    if not isinstance(draft, dict) or not isinstance(draft.get("text"), str):
        raise ValueError(RELOAD)
    return draft["text"], read_files(draft.get("files"))


def read_files(files: Any) -> list[str]:
    """The paths of uploaded files."""
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise ValueError(RELOAD)
    return _strings([file.get("path") for file in files])


def read_paths(text: Any) -> list[str]:
    """The paths in a JSON list."""
    try:
        return _strings(json.loads(text))
    except (TypeError, RecursionError):
        raise ValueError(RELOAD) from None


def read_index(event: gr.EventData) -> int:
    """Which message, or which example, an event is about."""
    index = _field(event, "index")
    if not isinstance(index, int):
        raise ValueError(RELOAD)
    return index


def read_text(event: gr.EventData) -> str:
    """What a question has been changed to."""
    return _strings([_field(event, "value")])[0]


def _field(event: gr.EventData, name: str) -> Any:
    try:
        return getattr(event, name, None)
    except TypeError:  # it came with no data
        return None


def _strings(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(RELOAD)
    return values
