"""The fields of a record and their types, in the order of the columns."""

import json

COLUMNS = {
    "path": str,  # as found; tar member: "shard.tar/name"; data URI: "list.jsonl:12"
    "id": str,  # from a list
    "digest": str,  # 32 hex digits, of the decoded pixels
    "caption": str,
    "error": str,  # why there is no caption
    "duplicate_of": str,  # path of the image with the same pixels, from which the caption is copied
    "width": int,
    "height": int,
    "prompt_tokens": int,
    "image_tokens": int,  # part of prompt_tokens
    "completion_tokens": int,
    "finish_reason": str,  # "eos", "length" or "error"; None for a folder, tar or line that could not be read
    "seconds": float,  # in the engine
    "time": float,  # when it was recorded, in seconds since the epoch
    "model": str,
    "prompt": str,
    "file": str,  # its caption file, if the format has one per image
    "settings": str,  # fingerprint of the settings
    "key": str,  # of this image, prompt and settings
}


def as_line(record: dict) -> str:
    """The record as a line of JSON, without its end."""
    # File names need not be Unicode: backslashreplace writes such characters as JSON escapes.
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
