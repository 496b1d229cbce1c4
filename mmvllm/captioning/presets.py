"""Predefined prompts and schemas, by the names that `--preset` takes."""

from typing import Any

DEFAULT_PROMPT = "Describe this image."
PRESETS = {
    "short": "Describe this image in one short sentence.",
    "detailed": "Describe this image in detail: the subject, the setting, colors, positions, actions and the style.",
    "alt-text": "Write alt text for this image for people who cannot see it: one or two plain sentences, at most 125 "
    "characters, without opening words such as 'image of'.",
    "tags": "List tags for this image: lowercase keywords for subject, setting, colors, style and mood, separated by "
    "commas, and nothing else.",
    "ocr": "Write out all text in this image exactly as it stands, line by line, and nothing else.",
    # The wording follows the examples of Qwen2.5-VL and Qwen3-VL.
    "boxes": "Locate the main objects in this image, each with a short label, and report the bbox coordinates in JSON "
    "format.",
    "tags-json": "Describe this image as a JSON object: subject, setting and style in a few words each, colors as a "
    "list, and tags, a list of lowercase keywords.",
    "product-json": "Describe the product in this image for a shop, as a JSON object: title, category, color, material "
    "and condition in a few words each, description in one or two sentences, and features, a list of short phrases.",
}


def _object_of(texts: dict[str, int], lists: dict[str, int]) -> dict[str, Any]:
    """Return the schema of an object with texts (name -> maximum length) and lists of short texts (name -> maximum)."""
    short = {"type": "string", "minLength": 1, "maxLength": 40}
    properties = {name: {"type": "string", "maxLength": length} for name, length in texts.items()}
    properties |= {name: {"type": "array", "items": short, "maxItems": number} for name, number in lists.items()}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


PRESET_SCHEMAS = {
    "tags-json": _object_of({"subject": 80, "setting": 80, "style": 80}, {"colors": 6, "tags": 16}),
    "product-json": _object_of(
        {"title": 80, "category": 40, "color": 40, "material": 40, "condition": 40, "description": 300}, {"features": 8}
    ),
}
