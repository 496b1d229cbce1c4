"""Check a request's arguments for the chat template, such as `enable_thinking`."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from mmvllm.errors import RequestError

NAME = "chat_template_kwargs"
# Arguments of transformers' `apply_chat_template` and functions it calls; so are all names that begin with "return_".
RESERVED = frozenset(
    (
        *("self", "messages", "conversation", "conversations", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("tokenizer_kwargs", "processor_kwargs", "load_audio_from_video", "sanitize_control_tokens"),
    )
)
MAX_DEPTH = 32  # of nested lists and dicts
MAX_VALUES = 65_536  # of a request's tools, of its template's arguments, of a schema: copying them takes 0.1 s


def check_template_kwargs(kwargs: Any) -> dict[str, Any]:
    """Return a copy of `chat_template_kwargs`, {} for None.

    Raises RequestError for anything but a dict, a reserved name, or a value that is not JSON.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise _error(f"must be a dict of names and JSON values, got {type(kwargs).__name__}")
    for name in kwargs:
        if not isinstance(name, str):
            raise _error(f"has the name {name!r:.50}, which is not a string")
        if name in RESERVED or name.startswith("return_"):
            raise _error(f"may not have {name!r}, an argument of apply_chat_template, not of templates; leave it out")
    return json_object_copy(kwargs, _error)


def json_object_copy(given: Mapping[str, Any], error: Callable[[str], RequestError]) -> dict[str, Any]:
    """Return a copy of a JSON object; raises `error(reason)` for values that are not JSON."""
    return {name: _json_copy(name, value, error, 1) for name, value in given.items()}


def _json_copy(name: str, value: Any, error: Callable[[str], RequestError], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise error(f"has lists and dicts that are nested more than {MAX_DEPTH} deep, in {name!r:.50}")
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json_copy(name, item, error, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_copy(name, item, error, depth + 1) for item in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise error(f"has {name!r:.50} with {value!r:.50}, which is not a JSON value")


def _error(reason: str) -> RequestError:
    return RequestError(f"{NAME} {reason}", param=NAME)
