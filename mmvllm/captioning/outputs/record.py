"""The fields of a record and their types, in the order of the columns; records as lines of JSON."""

import json
import re
from typing import Any

from mmvllm.captioning.json_captions import OBJECT
from mmvllm.captioning.multi_prompt import LIST
from mmvllm.utils.text import parse_json

COLUMNS = {
    "path": str,  # as found; tar member: "shard.tar/name"; data URI: "list.jsonl:12"
    "id": str,  # from a list
    "digest": str,  # 32 hex digits, of the decoded pixels; of a clip, of the sampled frames and their times
    "caption": str,
    "boxes": list,  # and points that the model wrote, as `Box.to_dict` and `Point.to_dict`; JSON text in tables
    "error": str,  # why there is no caption
    "duplicate_of": str,  # path of the image or video with the same content, from which the caption is copied
    "width": int,
    "height": int,
    "duration": float,  # of the video, in seconds, as are `start` and `end`
    "start": float,  # of the clip in its video; None for an image
    "end": float,
    "num_frames": int,  # sampled
    "fps": float,  # frames that are sampled per second of the clip
    "prompt_tokens": int,
    "image_tokens": int,  # of the image or clip; part of prompt_tokens
    "completion_tokens": int,
    "finish_reason": str,  # "eos", "length", "repetition" or "error"; None for what could not be read
    "seconds": float,  # in the engine
    "time": float,  # when it was recorded, in seconds since the epoch
    "model": str,
    "prompt": str,
    "file": str,  # its caption file, if the format has one
    "settings": str,  # fingerprint of the settings
    "key": str,  # of this image or clip, prompt and settings
}
MEDIA_INFO = (
    "digest",
    "width",
    "height",
    "duration",
    "start",
    "end",
    "num_frames",
    "fps",
)  # from preparation
OF_CLIPS = ("duration", "start", "end", "num_frames", "fps")
ADDED = ("boxes", *OF_CLIPS)  # outputs of earlier versions do not have them
MAX_LINE_BYTES = 16 << 20  # of several million tokens; parsed, a line can take 30 times its size
_KEY = re.compile(r"[0-9a-f]{32}")


def as_line(record: dict) -> str:
    """The record as a line of JSON, without its end."""
    # File names need not be Unicode: backslashreplace writes such characters as JSON escapes.
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def fitting(record: dict) -> dict:
    """The record; or, where its line would be too long to be read again, a failed one with cut texts."""
    if (size := len(as_line(record).encode())) < MAX_LINE_BYTES:
        return record
    cut = {name: value[:1000] if isinstance(value, str) else value for name, value in record.items()}
    nothing = {LIST: []} if LIST in record else {}
    nothing |= {name: None for name in ("caption", "boxes", "file", OBJECT) if name in record}
    error = f"its record would have {size} bytes, more than {MAX_LINE_BYTES}; shorten the prompt or the caption"
    return cut | nothing | {"error": error, "finish_reason": "error"}


def read_line(line: bytes) -> Any:
    """What a line says, with null for NaN and infinities, which JSON has not; raises ValueError if it is not JSON."""
    return parse_json(line, parse_constant=lambda _: None)


def parse_record(line: bytes) -> dict | None:
    """The record in a line; None if there is none, or if a field has a value of another type than jobs write."""
    try:
        record = read_line(line) if len(line) <= MAX_LINE_BYTES else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and _is_record(record) else None


def _is_record(record: dict) -> bool:
    if not record.keys() >= COLUMNS.keys() - set(ADDED) or not _has_types(record):
        return False
    needed = ("path", "settings", "key", *(("digest", "caption", "prompt") if record["error"] is None else ()))
    if any(record[name] is None for name in needed) or not _KEY.fullmatch(record["key"]):
        return False
    if record["file"] is not None and "\0" in record["path"] + record["file"]:
        return False
    entries = record.get(LIST, [])
    return isinstance(entries, list) and all(map(_is_entry, entries))


def _is_entry(entry: Any) -> bool:
    """Whether it can be one of several captions of a record."""
    is_complete = isinstance(entry, dict) and entry.keys() >= {"name", "caption", "finish_reason"}
    return is_complete and isinstance(entry["name"], str | None) and _has_types(entry)


def _has_types(record: dict) -> bool:
    return all(value is None or _is_a(value, COLUMNS[name]) for name, value in record.items() if name in COLUMNS)


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, int) and kind in (int, float):  # as columns of tables have it
        return not isinstance(value, bool) and abs(value) <= (2**63 - 1 if kind is int else 2**53)
    return isinstance(value, kind)


def is_clip(record: dict) -> bool:
    """Whether a record, or a card of one, is of a video or a clip of one."""
    return record.get("start") is not None
