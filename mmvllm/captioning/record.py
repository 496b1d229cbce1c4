"""What a record says, in the order of the columns."""

COLUMNS = {
    "path": str,  # as it was found; tar member: "shard.tar/name"; data URI: "list.jsonl:12"
    "id": str,  # from a list
    "digest": str,  # 32 hex digits, of the decoded pixels
    "caption": str,
    "error": str,  # why there is no caption
    "duplicate_of": str,  # path of the picture with the same pixels whose caption this is
    "width": int,
    "height": int,
    "prompt_tokens": int,
    "image_tokens": int,  # of the prompt's
    "completion_tokens": int,
    "finish_reason": str,  # "eos", "length" or "error"; None for a folder, tar or line that could not be read
    "seconds": float,  # in the engine
    "time": float,  # when it was recorded, in seconds since the epoch
    "model": str,
    "prompt": str,
    "file": str,  # its caption file, for txt and webdataset-json
    "settings": str,  # fingerprint of the settings
    "key": str,  # of this picture, asked this, with these settings
}
