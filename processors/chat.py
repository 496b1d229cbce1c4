"""Requests -> prompts: chat template, pictures, and placeholders expanded to one token per merged patch."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from mmvllm.processors.image import ImageInput, ImageProcessor, load_image, resize_for_part

REQUEST_KEYS = frozenset(
    (
        "messages",
        "text",
        "images",
        "min_pixels",
        "max_pixels",
        "request_id",
        "priority",
        "cache_salt",
        "sampling_params",
    )
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request made ready: `engine.add_request(prompt.token_ids, ..., **prompt.multimodal)`."""

    token_ids: list[int]
    multimodal: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Host memory that the pictures hold."""
        return sum(pixels.nbytes for pixels in self.multimodal.get("pixel_values", ()))


def expand_placeholders(
    token_ids: list[int], lengths: Sequence[int], image_token_id: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Make the i-th picture's placeholder `lengths[i]` tokens long; return the ids and each one's (offset, length).

    A prompt that already has sum(lengths) image tokens is left as it is. Raises ValueError where the counts disagree.
    """
    found = token_ids.count(image_token_id)
    if found not in (len(lengths), sum(lengths)):
        raise ValueError(
            f"prompt has {found} image placeholders but {len(lengths)} images were given; "
            "write one <|vision_start|><|image_pad|><|vision_end|> per image"
        )
    repeats = iter(lengths if found == len(lengths) else [1] * found)
    expanded: list[int] = []
    for token_id in token_ids:
        expanded.extend([token_id] * next(repeats) if token_id == image_token_id else [token_id])
    at = [i for i, token_id in enumerate(expanded) if token_id == image_token_id]
    placeholders, first = [], 0
    for length in lengths:
        placeholders.append((at[first], length))
        if at[first + length - 1] != at[first] + length - 1:
            raise ValueError("a picture's image tokens do not follow each other; one picture needs one run of them")
        first += length
    return expanded, placeholders


class Processor:
    """mmvllm's own request processor: equal to transformers' Qwen2-VL processor in ids, grid and pixel values."""

    def __init__(self, tokenizer, image_processor: ImageProcessor, image_token_id: int | None):
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.image_token_id = image_token_id
        self._lock = threading.Lock()  # a fast tokenizer may not be used by two threads at once

    def __call__(self, request: dict) -> Prompt:
        """Prepare one request; raises ValueError that says what is wrong, and with which image."""
        messages, parts = parse_request(request)
        images = [self._image(i, part, request) for i, part in enumerate(parts)]
        with self._lock:
            text = request["text"] if messages is None else _apply_template(self.tokenizer, messages)
            token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.image_token_id is None:
            if images:
                raise ValueError("this checkpoint is text-only, it cannot take images")
            return Prompt(token_ids)
        lengths = [prod(image.grid_thw) // self.image_processor.config.merge_size**2 for image in images]
        token_ids, placeholders = expand_placeholders(token_ids, lengths, self.image_token_id)
        return Prompt(token_ids, _multimodal(images, placeholders))

    def _image(self, i: int, part: dict, request: dict) -> ImageInput:
        try:
            image = resize_for_part(load_image(part["image"]), part, self.image_processor.config.factor)
            return self.image_processor(image, request.get("min_pixels"), request.get("max_pixels"))
        except ValueError as error:
            raise ValueError(f"image {i}: {error}") from error


class ForeignProcessor:
    """Adapts any object with the interface of transformers' Qwen2-VL processor."""

    def __init__(self, processor, image_token_id: int | None, merge_size: int):
        self.processor = processor
        self.image_token_id = image_token_id
        self.merge_size = merge_size
        self._lock = threading.Lock()

    def __call__(self, request: dict) -> Prompt:
        messages, parts = parse_request(request)
        bounds = {key: request[key] for key in ("min_pixels", "max_pixels") if request.get(key)}
        images = [self._image(i, bounds | part) for i, part in enumerate(parts)]
        with self._lock:
            text = request["text"] if messages is None else _apply_template(self.processor, messages)
            made = self.processor(text=[text], images=images or None, return_tensors="pt")
        token_ids = torch.as_tensor(made["input_ids"])[0].tolist()
        if not images:
            return Prompt(token_ids)
        grids = [tuple(grid) for grid in torch.as_tensor(made["image_grid_thw"]).tolist()]
        lengths = [prod(grid) // self.merge_size**2 for grid in grids]
        token_ids, placeholders = expand_placeholders(token_ids, lengths, self.image_token_id)
        pixel_values = torch.as_tensor(made["pixel_values"]).split([prod(grid) for grid in grids])
        return Prompt(
            token_ids,
            {"pixel_values": pixel_values, "image_grid_thw": grids, "vision_placeholders": placeholders},
        )

    def _image(self, i: int, part: dict):
        try:
            return resize_for_part(load_image(part["image"]), part)
        except ValueError as error:
            raise ValueError(f"image {i}: {error}") from error


def parse_request(request: dict) -> tuple[list[dict] | None, list[dict]]:
    """Split a request into messages for the chat template (None for plain `text`) and image parts, in order.

    Each part is a dict with the picture under "image", and maybe sizes of its own. Raises ValueError.
    """
    if not isinstance(request, dict):
        raise ValueError(f"a request must be a dict with 'messages' or 'text', not {type(request).__name__}")
    if unknown := sorted(map(str, set(request) - REQUEST_KEYS)):
        raise ValueError(f"request has unknown keys {', '.join(unknown)}; known: {', '.join(sorted(REQUEST_KEYS))}")
    if ("messages" in request) == ("text" in request):
        raise ValueError("a request needs either 'messages' or 'text'")
    for key in ("min_pixels", "max_pixels"):
        _check_size(key, request.get(key))
    if "messages" in request:
        if "images" in request:
            raise ValueError("'images' go with 'text'; with 'messages', put each picture into its message as a part")
        return _parse_messages(request["messages"])
    if not isinstance(request["text"], str):
        raise ValueError(f"'text' must be a string, not {type(request['text']).__name__}")
    images = request.get("images") or []
    if not isinstance(images, list | tuple):
        images = [images]
    return None, [_image_part(image) if isinstance(image, dict) else {"image": image} for image in images]


def _parse_messages(messages: Any) -> tuple[list[dict], list[dict]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError("'messages' must be a list of at least one {'role': ..., 'content': ...}")
    parsed, images = [], []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"a message must be a dict with 'role' and 'content', not {message!r:.100}")
        content = message["content"]
        if isinstance(content, list | tuple):
            content = [_parse_part(part, images) for part in content]
        elif not isinstance(content, str):
            raise ValueError(f"message content must be a string or a list of parts, not {type(content).__name__}")
        parsed.append({**message, "content": content})
    return parsed, images


def _parse_part(part: Any, images: list[dict]) -> dict:
    """The part as the template needs it; the picture itself goes to `images`."""
    if not isinstance(part, dict):
        raise ValueError(f"a content part must be a dict, not {type(part).__name__}")
    kind = part.get("type") or next((key for key in ("image", "image_url", "video", "text") if key in part), None)
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in ("image", "image_url"):
        images.append(_image_part(part))
        return {"type": "image"}
    if kind == "video":
        raise ValueError("video parts are not supported")
    raise ValueError(
        f"a content part must be text, image or image_url, not {kind!r} with keys {sorted(map(str, part))}"
    )


def _image_part(part: dict) -> dict:
    source = part.get("image")
    if source is None and (url := part.get("image_url")) is not None:
        source = url.get("url") if isinstance(url, dict) else url
    if source is None:
        raise ValueError("an image part needs 'image', or 'image_url' with 'url'")
    sizes = {key: part[key] for key in ("min_pixels", "max_pixels", "resized_height", "resized_width") if key in part}
    for key, value in sizes.items():
        _check_size(key, value)
    return {"image": source, **sizes}


def _check_size(key: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{key} is {value!r}, must be an integer of at least 1")


def _apply_template(owner, messages: list[dict]) -> str:
    """Render with a tokenizer's or a processor's own template; ValueError where it has none or refuses."""
    try:
        return owner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of their own, and raise what they like
        raise ValueError(f"the chat template cannot render these messages: {error}") from error


def _multimodal(images: list[ImageInput], placeholders: list[tuple[int, int]]) -> dict[str, Any]:
    if not images:
        return {}
    return {
        "pixel_values": [image.pixel_values for image in images],
        "image_grid_thw": [image.grid_thw for image in images],
        "vision_placeholders": placeholders,
        "image_digests": [image.digest for image in images],
    }
