"""The fields of a record and their types, in the order of the columns."""

import json

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
SEEN = ("digest", "width", "height", "duration", "start", "end", "num_frames", "fps")  # what preparation finds out
OF_CLIPS = ("duration", "start", "end", "num_frames", "fps")
ADDED = ("boxes", *OF_CLIPS)  # outputs of earlier versions do not have them


def as_line(record: dict) -> str:
    """The record as a line of JSON, without its end."""
    # File names need not be Unicode: backslashreplace writes such characters as JSON escapes.
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def is_clip(record: dict) -> bool:
    """Whether a record, or a card of one, is of a video or a clip of one."""
    return record.get("start") is not None
