"""The fields of a record and their types, in the order of the columns, and records as lines of JSON."""

import json
import re
from typing import Any

from mmvllm.captioning.json_captions import OBJECT
from mmvllm.captioning.multi_prompt import LIST
from mmvllm.utils.text import parse_json

COLUMNS = {
    "path": str,  # as found; tar member: "shard.tar/name"; data URI: "list.jsonl:12"
    "id": str,  # from a list
    "digest": str,  # 32 hex digits: of the decoded pixels, or of a clip's sampled frames and their times
    "caption": str,
    "boxes": list,  # boxes and points that the model wrote, by `Box.to_dict` and `Point.to_dict`; JSON text in tables
    "error": str,  # why there is no caption
    "duplicate_of": str,  # path of the image or video with the same content, from which the caption is copied
    "width": int,
    "height": int,
    "duration": float,  # of the video, in seconds; `start` and `end` are in seconds, too
    "start": float,  # of the clip in its video; None for an image
    "end": float,
    "num_frames": int,  # sampled
    "fps": float,  # sampled frames per second of the clip
    "prompt_tokens": int,
    "image_tokens": int,  # of the image or clip; part of prompt_tokens
    "completion_tokens": int,
    "finish_reason": str,  # "eos", "length", "repetition" or "error"; None if a folder, tar or line was unreadable
    "seconds": float,  # time in the engine
    "time": float,  # when it was recorded, in seconds since the epoch
    "model": str,
    "prompt": str,
    "file": str,  # its caption file, if the format has one
    "settings": str,  # fingerprint of the settings
    "key": str,  # identifies the image or clip with this prompt and these settings
}
TRUNCATED = "truncated"  # a further field, True, of a record whose image lacks its last rows
MEDIA_INFO = ("digest", "width", "height", "duration", "start", "end", "num_frames", "fps")  # from preparation
MAX_LINE_BYTES = 16 << 20  # several million tokens; a parsed line can take 30 times its size in memory
_KEY = re.compile(r"[0-9a-f]{32}")


def as_line(record: dict) -> str:
    """Return the record as a line of JSON, without the line break."""
    # File names need not be Unicode: backslashreplace writes such characters as JSON escapes.
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def fitting(record: dict) -> dict:
    """Return the record, or a failed record with shortened texts if its line would be too long to read again."""
    if (size := len(as_line(record).encode())) < MAX_LINE_BYTES:
        return record
    cut = {name: value[:1000] if isinstance(value, str) else value for name, value in record.items()}
    nothing = {LIST: []} if LIST in record else {}
    nothing |= {name: None for name in ("caption", "boxes", "file", OBJECT) if name in record}
    error = f"its record would have {size} bytes, more than {MAX_LINE_BYTES}; shorten the prompt or the caption"
    return cut | nothing | {"error": error, "finish_reason": "error"}


def read_line(line: bytes) -> Any:
    """Parse a line of JSON, with None for NaN and infinities, which JSON lacks; raises ValueError if it is not JSON."""
    return parse_json(line, parse_constant=lambda _: None)


def parse_record(line: bytes) -> dict | None:
    """Return the record in a line; None if there is none, or if a field has a type that jobs never write."""
    try:
        record = read_line(line) if len(line) <= MAX_LINE_BYTES else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and _is_record(record) else None


def _is_record(record: dict) -> bool:
    if not record.keys() >= COLUMNS.keys() or not _has_types(record):
        return False
    needed = ("path", "settings", "key", *(("digest", "caption", "prompt") if record["error"] is None else ()))
    if any(record[name] is None for name in needed) or not _KEY.fullmatch(record["key"]):
        return False
    if record["file"] is not None and "\0" in record["path"] + record["file"]:
        return False
    entries = record.get(LIST, [])
    return isinstance(entries, list) and all(map(_is_entry, entries))


def _is_entry(entry: Any) -> bool:
    """Return whether a value can be one of several captions of a record."""
    is_complete = isinstance(entry, dict) and entry.keys() >= {"name", "caption", "finish_reason"}
    return is_complete and isinstance(entry["name"], str | None) and _has_types(entry)


def _has_types(record: dict) -> bool:
    return all(value is None or _is_a(value, COLUMNS[name]) for name, value in record.items() if name in COLUMNS)


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, int) and kind in (int, float):  # the range of table columns
        return not isinstance(value, bool) and abs(value) <= (2**63 - 1 if kind is int else 2**53)
    return isinstance(value, kind)


def is_clip(record: dict) -> bool:
    """Return whether a record, or its card in a report, describes a video or a clip."""
    return record.get("start") is not None
