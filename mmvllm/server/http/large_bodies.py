"""Sets aside the data URIs of images and videos in large bodies, before the rest of the body is parsed.

The rest has a separate size limit: text may take eighteen times its size in memory once it is parsed, and single C
calls process it while they hold the GIL for seconds.
"""

import re
import secrets
import string
from typing import Any

from mmvllm.server.errors import ApiError
from mmvllm.server.settings import BODY_BYTES

MAX_TEXT_BYTES = BODY_BYTES  # of a body without its data URIs
MAX_QUOTES = 4_000_000  # enough for the strings of all items that a body may have
MIN_LENGTH = 1024  # shorter strings are not set aside

_BASE64 = (string.ascii_letters + string.digits + "+/=-_,\n\r").encode()  # a comma separates frames of a video
_KEY_END = re.compile(rb"[ \t\n\r]*:")
_ESCAPES = {rb"\/": b"/", rb"\n": b"\n", rb"\r": b"\r"}  # escapes that some clients use
_URI = re.compile(rb"data:[\w.+/;=-]{0,200},", re.ASCII)
_PIECE_BYTES = 1024 * 1024  # checked in one call


def set_aside(body: bytes) -> tuple[bytes, dict[str, str]]:
    """Return the JSON with a mark in place of each data URI, and the URIs keyed by their marks.

    Raises ApiError if the rest is too large.
    """
    if body.count(b'"') > MAX_QUOTES:
        raise ApiError(413, f"a body of more than {MAX_TEXT_BYTES} bytes may have at most {MAX_QUOTES} quotation marks")
    parts, name, strings = body.split(b'"'), secrets.token_hex(16), {}
    for i in range(1, len(parts) - 1):
        if len(parts[i]) < MIN_LENGTH or _KEY_END.match(parts[i + 1]) or parts[i - 1].endswith(b"\\"):
            continue  # a backslash may escape the quotation mark
        if (text := _text(parts[i])) is not None:
            mark = f"{name}-{len(strings)}"
            strings[mark], parts[i] = text, mark.encode()
    rest = b'"'.join(parts)
    if len(rest) > MAX_TEXT_BYTES:
        raise ApiError(413, f"the body has more than {MAX_TEXT_BYTES} bytes outside data URIs")
    return rest, strings


def restored(value: Any, strings: dict[str, str]) -> Any:
    """Return a copy of the parsed value with the strings that were set aside."""
    if isinstance(value, str):
        return strings.get(value, value)
    if isinstance(value, dict):
        return {key: restored(item, strings) for key, item in value.items()}
    return [restored(item, strings) for item in value] if isinstance(value, list) else value


def _text(part: bytes) -> str | None:
    """Return the unescaped text of a JSON string if it is a data URI, else None."""
    if not part.startswith(b"data:") or b"\n" in part or b"\r" in part:  # invalid in a JSON string
        return None
    if b"\\" in part:
        for escape, character in _ESCAPES.items():
            part = part.replace(escape, character)
    if (start := _URI.match(part)) is None:
        return None
    for at in range(start.end(), len(part), _PIECE_BYTES):
        if part[at : at + _PIECE_BYTES].translate(None, _BASE64):
            return None
    return part.decode("ascii")
