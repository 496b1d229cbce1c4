"""Bodies that are large because of images and videos: their base64 is set aside before the rest is parsed.

What is not base64 has a limit of its own: as text, a body may take eighteen times its size, and seconds in single calls
that no other thread can interrupt.
"""

import json
import re
import secrets
import string
from typing import Any

from mmvllm.server.errors import ApiError

MAX_TEXT_BYTES = 32 * 1024 * 1024  # of a body without the base64 in it
MAX_QUOTES = 4_000_000  # as many strings as the items of a body may have
MIN_LENGTH = 1024  # of a string that is set aside

_BASE64 = (string.ascii_letters + string.digits + "+/=-_").encode()
_URI = re.compile(rb"data:[\w.+/\\;=-]{0,200},", re.ASCII)
_PIECE_BYTES = 1024 * 1024  # that are looked at in one call


def set_aside(body: bytes) -> tuple[bytes, dict[str, str]]:
    """The JSON with a mark in place of each string of base64 or data URI, and the strings by their marks.

    Raises ApiError if the rest is too large.
    """
    if body.count(b'"') > MAX_QUOTES:
        raise ApiError(413, f"a body of more than {MAX_TEXT_BYTES} bytes may have {MAX_QUOTES} quotation marks")
    parts, name, strings = body.split(b'"'), secrets.token_hex(16), {}
    for i in range(1, len(parts) - 1):
        is_key = parts[i + 1][:16].lstrip().startswith(b":")
        if len(parts[i]) < MIN_LENGTH or is_key or parts[i - 1].endswith(b"\\"):  # which may escape the quotation mark
            continue
        if (text := _text(parts[i])) is not None:
            mark = f"{name}-{len(strings)}"
            strings[mark], parts[i] = text, mark.encode()
    rest = b'"'.join(parts)
    if len(rest) > MAX_TEXT_BYTES:
        raise ApiError(413, f"the body has more than {MAX_TEXT_BYTES} bytes that are no image or video in base64")
    return rest, strings


def restored(value: Any, strings: dict[str, str]) -> Any:
    """A copy of what was parsed, with the strings that were set aside."""
    if isinstance(value, str):
        return strings.get(value, value)
    if isinstance(value, dict):
        return {key: restored(item, strings) for key, item in value.items()}
    return [restored(item, strings) for item in value] if isinstance(value, list) else value


def _text(part: bytes) -> str | None:
    """What a string of JSON says, if it is base64 or a data URI; some clients escape each slash."""
    uri = _URI.match(part)
    for at in range(uri.end() if uri else 0, len(part), _PIECE_BYTES):
        if (rest := part[at : at + _PIECE_BYTES].translate(None, _BASE64)) and rest.strip(b"\\"):
            return None
    if b"\\" not in part:
        return part.decode("ascii")
    if b"\\u" in part:  # of any character
        return None
    try:
        return json.loads(b'"%s"' % part)
    except ValueError:
        return None
