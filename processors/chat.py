"""Requests -> prompts: chat template, pictures, and placeholders expanded to one token per merged patch."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from PIL.Image import Image

from mmvllm.errors import RequestError
from mmvllm.processors.image import PART_SIZES, ImageInput, ImageProcessor, resize_for_part
from mmvllm.processors.load import load_image

CONTENT_KEYS = ("messages", "text", "images", "min_pixels", "max_pixels")
REQUEST_KEYS = frozenset((*CONTENT_KEYS, "request_id", "priority", "cache_salt", "sampling_params"))
TEXT_KEYS = frozenset(("type", "text"))
IMAGE_KEYS = frozenset(("type", "image", "image_url", *PART_SIZES))


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
            f"prompt has {found} image placeholders but {len(lengths)} images were given; write "
            "<|vision_start|><|image_pad|><|vision_end|> once per image and nowhere else "
            f"(already expanded, {sum(lengths)} <|image_pad|> in all)"
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


def tokenize(tokenizer, text: str) -> list[int]:
    """Token ids of a text as it stands: the chat template has written the special tokens out."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, from a file name or a broken JSON, say
        raise ValueError(f"the text is not valid Unicode ({error})") from None
    # Not verbose: a text that is too long for the model is refused with a message of our own.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


class Processor:
    """mmvllm's own request processor: equal to transformers' Qwen2-VL processor in ids, grid and pixel values."""

    def __init__(self, tokenizer, image_processor: ImageProcessor, image_token_id: int | None):
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.image_token_id = image_token_id
        self._lock = threading.Lock()  # a fast tokenizer may not be used by two threads at once

    def __reduce__(self):
        """A processor in another process gets a lock of its own."""
        return Processor, (self.tokenizer, self.image_processor, self.image_token_id)

    def __call__(self, request: dict, load: Callable[[Any], Image] = load_image) -> Prompt:
        """Prepare one request, its pictures read by `load`; raises ValueError that says what is wrong, and with which
        image."""
        messages, parts = parse_request(request)
        _check_takes_images(parts, self.image_token_id)
        images = [self._image(i, part, request, load) for i, part in enumerate(parts)]
        with self._lock:
            text = request["text"] if messages is None else _apply_template(self.tokenizer, messages)
            token_ids = tokenize(self.tokenizer, text)
        lengths = [prod(image.grid_thw) // self.image_processor.config.merge_size**2 for image in images]
        token_ids, placeholders = expand_placeholders(token_ids, lengths, self.image_token_id)
        return Prompt(token_ids, _multimodal(images, placeholders))

    def _image(self, i: int, part: dict, request: dict, load: Callable[[Any], Image]) -> ImageInput:
        with _naming_image(i):
            image = resize_for_part(load(part["image"]), part, self.image_processor.config.factor)
            return self.image_processor(image, request.get("min_pixels"), request.get("max_pixels"))


class ForeignProcessor:
    """Adapts any object with the interface of transformers' Qwen2-VL processor: `apply_chat_template`, and a call with
    `text`, `images` and `return_tensors`.

    That interface has no pixel bounds, so a request's own are applied to the picture beforehand; the processor's come
    after them, and hold.
    """

    def __init__(self, processor, image_token_id: int | None, merge_size: int):
        self.processor = processor
        self.image_token_id = image_token_id
        self.merge_size = merge_size
        self._lock = threading.Lock()  # nothing says that it may be used by two threads at once

    def __call__(self, request: dict) -> Prompt:
        """Prepare one request; raises ValueError that says what is wrong, and with which image."""
        messages, parts = parse_request(request)
        _check_takes_images(parts, self.image_token_id)
        images = [self._image(i, part, request) for i, part in enumerate(parts)]
        with self._lock:
            text = request["text"] if messages is None else _apply_template(self.processor, messages)
            made = self.processor(text=[text], images=images or None, return_tensors="pt")
        return self._prompt(made, len(images))

    def _image(self, i: int, part: dict, request: dict):
        bounds = {key: request.get(key) for key in ("min_pixels", "max_pixels")}
        with _naming_image(i):
            return resize_for_part(resize_for_part(load_image(part["image"]), part), bounds)

    def _prompt(self, made, num_images: int) -> Prompt:
        token_ids = _tensor(made, "input_ids")[0].tolist()
        grids = [tuple(grid) for grid in _tensor(made, "image_grid_thw").tolist()] if num_images else []
        if len(grids) != num_images:
            raise ValueError(f"the processor returned {len(grids)} image_grid_thw for {num_images} images")
        lengths = [prod(grid) // self.merge_size**2 for grid in grids]
        token_ids, placeholders = expand_placeholders(token_ids, lengths, self.image_token_id)
        if not num_images:
            return Prompt(token_ids)
        pixels, sizes = _tensor(made, "pixel_values"), [prod(grid) for grid in grids]
        if len(pixels) != sum(sizes):
            raise ValueError(f"the processor returned {len(pixels)} pixel_values for image_grid_thw {grids}")
        vision = {"pixel_values": pixels.split(sizes), "image_grid_thw": grids, "vision_placeholders": placeholders}
        return Prompt(token_ids, vision)


def parse_request(request: dict) -> tuple[list[dict] | None, list[dict]]:
    """Split a request into messages for the chat template (None for plain `text`) and image parts, in order.

    Each part is a dict with the picture under "image", and maybe sizes of its own. Raises ValueError.
    """
    if not isinstance(request, dict):
        raise ValueError(f"a request must be a dict with 'messages' or 'text', not {type(request).__name__}")
    _check_keys("request", request, REQUEST_KEYS)
    _check_sizes(request)
    messages, text, images = (request.get(key) for key in ("messages", "text", "images"))
    images = [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
    if text is None and "messages" in request:
        if images:
            raise ValueError("'images' go with 'text'; with 'messages', put each picture into its message as a part")
        return _parse_messages(messages)
    if text is None or messages is not None:
        raise ValueError("a request needs either 'messages' or 'text'")
    if not isinstance(text, str):
        raise ValueError(f"'text' must be a string, not {type(text).__name__}")
    parts = [image if isinstance(image, dict) else {"image": image} for image in images]
    return None, [_image_part(i, part) for i, part in enumerate(parts)]


def _parse_messages(messages: Any) -> tuple[list[dict], list[dict]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"'messages' must be a list of at least one {{'role', 'content'}} dict, not {messages!r:.100}")
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
    part = {key: value for key, value in part.items() if value is not None}
    kind = part.get("type") or next((key for key in ("image", "image_url", "video", "text") if key in part), None)
    if kind in ("image", "image_url"):
        images.append(_image_part(len(images), part))
        return {"type": "image"}
    if kind in ("video", "video_url"):
        raise ValueError("video parts are not supported; give frames of it as image parts")
    if kind != "text":
        raise ValueError(
            f"a content part must be text, image or image_url, not {kind!r} with keys {sorted(map(str, part))}"
        )
    _check_keys("text part", part, TEXT_KEYS)
    if not isinstance(part.get("text"), str):
        raise ValueError(f"a text part needs 'text' with a string, not {part.get('text')!r:.40}")
    return {"type": "text", "text": part["text"]}


def _image_part(i: int, part: dict) -> dict:
    """The picture under "image", with the sizes that are given."""
    with _naming_image(i):
        part = {key: value for key, value in part.items() if value is not None}
        _check_keys("image part", part, IMAGE_KEYS)
        _check_sizes(part)
        source = part.get("image", part.get("image_url"))
        if isinstance(source, dict):
            source = source.get("url")
        if source is None:
            raise ValueError("an image part needs 'image', or 'image_url' with 'url'")
        return {"image": source, **{key: part[key] for key in PART_SIZES if key in part}}


def _check_keys(what: str, given: dict, known: frozenset[str]) -> None:
    if unknown := sorted(map(str, given.keys() - known)):
        raise ValueError(f"{what} has unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}")


def _check_sizes(given: dict) -> None:
    for key in PART_SIZES:
        value = given.get(key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= sys.maxsize
        ):
            raise ValueError(f"{key} is {value!r:.40}, must be an integer of at least 1 and at most {sys.maxsize}")


def _tensor(made, name: str) -> torch.Tensor:
    if name not in made:
        raise ValueError(f"the processor returned no {name}, only {', '.join(made)}")
    return torch.as_tensor(made[name])


def _check_takes_images(parts: list[dict], image_token_id: int | None) -> None:
    if parts and image_token_id is None:
        raise ValueError("this checkpoint is text-only, it cannot take images")


@contextmanager
def _naming_image(i: int) -> Iterator[None]:
    """Add the index of the image to a ValueError."""
    try:
        yield
    except ValueError as error:
        raise RequestError(str(error), image_index=i) from error


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
