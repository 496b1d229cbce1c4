"""Predefined prompts, by the names that `--preset` takes."""

DEFAULT_PROMPT = "Describe this image."
PRESETS = {
    "short": "Describe this image in one short sentence.",
    "detailed": "Describe this image in detail: the subject, the setting, colors, positions, actions and the style.",
    "alt-text": "Write alt text for this image for people who cannot see it: one or two plain sentences, at most 125 "
    "characters, without opening words such as 'image of'.",
    "tags": "List tags for this image: lowercase keywords for subject, setting, colors, style and mood, separated by "
    "commas, and nothing else.",
    "ocr": "Write out all text in this image exactly as it stands, line by line, and nothing else.",
    # In the words of Qwen2.5-VL's and Qwen3-VL's own examples.
    "boxes": "Locate the main objects in this image, each with a short label, and report the bbox coordinates in JSON "
    "format.",
}
