"""Text helpers: format numbers, names and choices for messages, and read untrusted text and JSON."""

import codecs
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_DIRECTIONS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_PAIR, _HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]"), re.compile("[\ud800-\udfff]+")  # of surrogates
MAX_JSON_BYTES = 64 << 20  # of a file; indexes of the largest checkpoints have a few MiB


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 image" or "2 images"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def with_article(kind: str) -> str:
    """Return a kind of media with its article: "an image" or "a video"."""
    return f"an {kind}" if kind == "image" else f"a {kind}"


def listed(items: Iterable[Any], conjunction: str = "or") -> str:
    """Return the representations of one or several items as a list: "'a', 'b' or 'c'"."""
    *first, last = map(repr, items)
    return f"{', '.join(first)} {conjunction} {last}" if first else last


def some_of(names: Sequence[str], most: int = 5) -> str:
    """Return the first names for a message, "a, b and 2 others", each shortened and without control characters."""
    more = f" and {counted(len(names) - most, 'other')}" if len(names) > most else ""
    return ", ".join(printable(name[:200]) for name in names[:most]) + more


def shown(value: Any, most: int = 200) -> str:
    """Return the `repr` of a value for a message, cut after `most` characters; its type, if `repr` fails.

    Python refuses to format integers of thousands of digits and lists nested thousands of levels deep.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]} …"


def suggestion(word: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown word, which suggests a similar known word if there is one."""
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def has_more_values(value: Any, most: int) -> bool:
    """Return whether the lists and dicts in a value have more than `most` values in total; stops counting early."""
    found, count = [value], 0
    while found:
        one = found.pop()
        if isinstance(one, dict | list):
            count += len(one)
            if count > most:
                return True
            found.extend(one.values() if isinstance(one, dict) else one)
    return False


def printable(text: str, keeps: str = "") -> str:
    """Escape the control characters of an untrusted text, which a terminal would obey, except the ones in `keeps`."""
    return "".join(repr(char)[1:-1] if _is_control(char) and char not in keeps else char for char in text)


def _is_control(char: str) -> bool:
    """Return whether a character is a control character, line separator, direction mark or surrogate."""
    return unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in _DIRECTIONS


def beginning_of(text: str, most: int) -> str:
    """Cut a host's text after at most `most` characters, between words, so that no login is cut in two."""
    return text if len(text) <= most else f"{text[: most + 1].rpartition(' ')[0]} …".strip()


def without_logins(text: str) -> str:
    """Remove users and passwords of URLs from a text for a message, and shorten it: a host may have written it."""
    return re.sub(r"//\S*@", "//***@", beginning_of(text, 2000))


def with_whole_characters(value: Any) -> Any:
    """Return a copy of a JSON value in which U+FFFD replaces each lone surrogate of its strings.

    Lone surrogates cannot be encoded. Clients that truncate text produce them, and resend them with every later message
    of a conversation.
    """
    if isinstance(value, str):
        if value.isascii() or not _HALVES.search(value):
            return value
        # A codec would take a second for millions of surrogates, holding the GIL all the time.
        return _HALVES.sub(lambda found: "\ufffd" * len(found[0]), _PAIR.sub(_whole, value))
    if isinstance(value, dict):
        return {with_whole_characters(key): with_whole_characters(item) for key, item in value.items()}
    return [with_whole_characters(item) for item in value] if isinstance(value, list | tuple) else value


def _whole(pair: re.Match) -> str:
    return pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def check_json_size(data: bytes, most: int) -> None:
    """Raise ValueError for JSON that may have more than `most` values; brackets and commas in strings count, too."""
    if sum(map(data.count, (b"{", b"[", b","))) > most:
        raise ValueError(f"more than {most:,} values")


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and infinities, which Python's parser accepts: a `parse_constant` of `json.loads`."""
    raise ValueError(f"{name} is not JSON")


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON like `json.loads`; raises ValueError also for JSON that is nested too deeply."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def load_json(path: Path) -> Any:
    """Read a JSON file; raises OSError, and ValueError for invalid JSON or more than `MAX_JSON_BYTES`."""
    return parse_json(read_text(path))


def check_file_size(path: Path) -> None:
    """Raise ValueError for a file of more than `MAX_JSON_BYTES`, which another library would read as a whole."""
    if path.is_file() and path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} cannot be used: it has more than {MAX_JSON_BYTES >> 20} MiB")


def read_text(path: Path) -> str:
    """Read a text file as `decode_text` does; raises OSError, and ValueError if it has more than `MAX_JSON_BYTES`."""
    with path.open("rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
    return decode_text(content)


def decode_text(content: bytes) -> str:
    """Decode what an editor has saved: UTF-8, or UTF-16 with a byte order mark. The mark is no part of the text.

    Raises ValueError, without the bytes of the text, for other encodings.
    """
    try:
        return content.decode(marked_encoding(content) or "utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("it is text neither in UTF-8 nor in UTF-16 with a byte order mark; save it as UTF-8") from None


def marked_encoding(content: bytes) -> str | None:
    """Return "utf-16" for text that begins with its byte order mark, else None."""
    return "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else None
