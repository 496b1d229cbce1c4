"""Requests -> `EngineInput`: chat template, images, and placeholders expanded to one token per merged patch."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from PIL.Image import Image

from mmvllm.errors import RequestError
from mmvllm.inputs import EngineInput, MediaItem, MediaRules, Span
from mmvllm.processors.image import ImageInput, ImageProcessor, resize_for_part
from mmvllm.processors.load import load_image
from mmvllm.processors.requests import ParsedRequest, naming_image, parse_request
from mmvllm.processors.special_tokens import SpecialTokens, check_unicode
from mmvllm.processors.tensors import items_from_tensors, own_grids, own_token_ids
from mmvllm.text import counted


def expand_placeholders(
    token_ids: list[int], lengths: Sequence[int], rules: MediaRules
) -> tuple[list[int], list[Span]]:
    """Put `lengths[i]` placeholder tokens between the i-th pair of start and end tokens, whatever stands there.

    Returns the ids and each image's (offset, length). Raises RequestError for another number of pairs than images, a
    start token without an end, and a placeholder outside a pair.
    """
    expanded: list[int] = []
    spans: list[Span] = []
    num_pairs = num_outside = num_open = 0
    i = 0
    while i < len(token_ids):
        token_id = token_ids[i]
        expanded.append(token_id)
        i += 1
        if token_id == rules.image_token_id:
            num_outside += 1
        elif token_id == rules.start_token_id:
            end = _find_end(token_ids, i, rules)
            if end is None:
                num_open += 1
                continue
            if num_pairs < len(lengths):
                spans.append((len(expanded), lengths[num_pairs]))
                expanded += [rules.image_token_id] * lengths[num_pairs]
            num_pairs += 1
            i = end
    if num_outside or num_open or num_pairs != len(lengths):
        raise RequestError(_misplaced(num_pairs, num_outside, num_open, len(lengths), rules))
    return expanded, spans


def _find_end(token_ids: list[int], start: int, rules: MediaRules) -> int | None:
    """The next end token, unless another start token comes first."""
    for i in range(start, len(token_ids)):
        if token_ids[i] == rules.end_token_id:
            return i
        if token_ids[i] == rules.start_token_id:
            return None
    return None


def _misplaced(num_pairs: int, num_outside: int, num_open: int, num_images: int, rules: MediaRules) -> str:
    found = counted(num_pairs, "image placeholder")
    if num_outside:
        found += f", {num_outside} {rules.image} outside {rules.start} and {rules.end},"
    if num_open:
        found += f", {num_open} {rules.start} without {rules.end},"
    were = "was" if num_images == 1 else "were"
    return (
        f"prompt has {found} but {counted(num_images, 'image')} {were} given; "
        f"write {rules.start}{rules.image}{rules.end} once per image and nowhere else"
    )


def tokenize(tokenizer, text: str) -> list[int]:
    """Token ids of a text as it stands, special tokens included."""
    check_unicode(text)
    # Not verbose: a text that is too long for the model is refused with a message of our own.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


class Processor:
    """mmvllm's own request processor: ids, grids and pixel values equal those of transformers' processor.

    Special tokens in messages and `chat_template_kwargs` are encoded as text, unless the request has
    `allow_special_tokens`.

    Args:
        rules: of the model's family; None for a text-only checkpoint.
    """

    def __init__(self, tokenizer, image_processor: ImageProcessor, rules: MediaRules | None):
        self.tokenizer, self.image_processor, self.rules = tokenizer, image_processor, rules
        self._special_tokens = SpecialTokens(tokenizer)
        self._lock = threading.Lock()  # a fast tokenizer may not be used by two threads at once

    def __reduce__(self):
        """A processor in another process gets a lock of its own."""
        return Processor, (self.tokenizer, self.image_processor, self.rules)

    def __call__(self, request: dict, load: Callable[[Any], Image] = load_image) -> EngineInput:
        """Prepare one request, its images read by `load`; raises RequestError that says what is wrong, and where."""
        parsed = parse_request(request)
        _check_takes_images(parsed, self.rules)
        if self.rules is None and parsed.messages:
            parsed = parsed._replace(messages=[_as_string(message) for message in parsed.messages])
        images = [self._image(i, part, request, load) for i, part in enumerate(parsed.images)]
        with self._lock:
            token_ids = self._token_ids(parsed)
        if self.rules is None:
            return EngineInput(token_ids)
        lengths = [self.rules.num_tokens(image.grid_thw) for image in images]
        token_ids, spans = expand_placeholders(token_ids, lengths, self.rules)
        items = tuple(
            MediaItem("image", image.pixel_values, image.grid_thw, image.digest, (span,))
            for image, span in zip(images, spans, strict=True)
        )
        return self.rules.engine_input(token_ids, items)

    def _token_ids(self, parsed: ParsedRequest) -> list[int]:
        if parsed.token_ids is not None:
            return own_token_ids(parsed.token_ids)
        text, marked = _text(parsed, self.tokenizer, self._special_tokens)
        return tokenize(self.tokenizer, text) if marked is None else self._special_tokens.token_ids(marked)

    def _image(self, i: int, part: dict, request: dict, load: Callable[[Any], Image]) -> ImageInput:
        with naming_image(i):
            image = resize_for_part(load(part["image"]), part, self.image_processor.config.factor)
            return self.image_processor(image, request.get("min_pixels"), request.get("max_pixels"))


class ForeignProcessor:
    """Adapts an object with the interface of transformers' processors: `apply_chat_template`, and a call with `text`,
    `images` and `return_tensors`.

    That interface has no pixel bounds, so a request's own are applied to the image beforehand; the processor's come
    after them. What it returns may be on any device, and is copied: it may reuse its buffers. It would encode special
    tokens in messages as control tokens, so they are refused, unless the request has `allow_special_tokens`.

    Args:
        tokenizer: the model's, which says what the special tokens are.
        factor: sides of a resized image are multiples of this many pixels.
    """

    def __init__(self, processor, tokenizer, rules: MediaRules | None, factor: int):
        self.processor, self.tokenizer, self.rules, self.factor = processor, tokenizer, rules, factor
        self._special_tokens = SpecialTokens(tokenizer)
        self._lock = threading.Lock()  # the interface does not promise that two threads may use it at once

    def __reduce__(self):
        """A processor in another process gets a lock of its own."""
        return ForeignProcessor, (self.processor, self.tokenizer, self.rules, self.factor)

    def __call__(self, request: dict, load: Callable[[Any], Image] = load_image) -> EngineInput:
        """Prepare one request; raises RequestError that says what is wrong, and with which image."""
        parsed = parse_request(request)
        _check_takes_images(parsed, self.rules)
        images = [self._image(i, part, request, load) for i, part in enumerate(parsed.images)]
        if parsed.token_ids is not None:
            return self._without_images(parsed)
        with self._lock:
            text, marked = _text(parsed, self.processor, self._special_tokens)
            if marked is not None:
                raise RequestError(
                    "messages or chat_template_kwargs have special tokens, which a processor of your own would encode "
                    "as control tokens; remove them, or give allow_special_tokens",
                    param="messages",
                )
            made = self.processor(text=[text], images=images or None, return_tensors="pt")
            return self._engine_input(made, len(images))

    def _without_images(self, parsed: ParsedRequest) -> EngineInput:
        """Token ids, which the interface does not take, need no processor unless there are images."""
        if parsed.images:
            raise RequestError("a processor of your own needs a prompt with images as text, not as token ids")
        token_ids = own_token_ids(parsed.token_ids)
        return EngineInput(token_ids if self.rules is None else expand_placeholders(token_ids, [], self.rules)[0])

    def _image(self, i: int, part: dict, request: dict, load: Callable[[Any], Image]) -> Image:
        bounds = {key: request.get(key) for key in ("min_pixels", "max_pixels")}
        with naming_image(i):
            image = resize_for_part(load(part["image"]), part, self.factor)
            return resize_for_part(image, bounds, self.factor)

    def _engine_input(self, made, num_images: int) -> EngineInput:
        token_ids = own_token_ids(_returned(made, "input_ids")[0])
        if self.rules is None:
            return EngineInput(token_ids)
        grids = own_grids(_returned(made, "image_grid_thw"), self.rules.merge_size) if num_images else []
        if len(grids) != num_images:
            raise RequestError(f"the processor returned {len(grids)} image_grid_thw for {counted(num_images, 'image')}")
        lengths = [self.rules.num_tokens(grid) for grid in grids]
        token_ids, spans = expand_placeholders(token_ids, lengths, self.rules)
        if not num_images:
            return EngineInput(token_ids)
        items = items_from_tensors(self.rules, token_ids, _returned(made, "pixel_values"), grids, spans)
        return self.rules.engine_input(token_ids, items)


def _returned(made, name: str) -> Any:
    if name not in made:
        raise RequestError(f"the processor returned no {name}, only {', '.join(made) or 'an empty dict'}")
    return made[name]


def _check_takes_images(parsed: ParsedRequest, rules: MediaRules | None) -> None:
    if parsed.images and rules is None:
        raise RequestError("this checkpoint is text-only, it cannot take images")


def _as_string(message: dict) -> dict:
    """A message as templates of text-only models take it: with a string instead of text parts."""
    content = message["content"]
    return message if isinstance(content, str) else {**message, "content": "".join(part["text"] for part in content)}


def _text(parsed: ParsedRequest, owner, special_tokens: SpecialTokens) -> tuple[str, str | None]:
    """The text to tokenize; and, if special tokens of messages are to be encoded as text, the text that marks them."""
    if parsed.messages is None:
        return parsed.text, None
    given = [parsed.messages, parsed.template_kwargs]
    if parsed.allow_special_tokens:
        return _apply_template(owner, *given), None
    return special_tokens.render(lambda values: _apply_template(owner, *values), given)


def _apply_template(owner, messages: list[dict], kwargs: dict[str, Any]) -> str:
    """Render with a tokenizer's or a processor's own template; RequestError where it has none or refuses."""
    try:
        return owner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    except Exception as error:  # templates are programs, and raise anything
        what = "these messages and chat_template_kwargs" if kwargs else "these messages"
        raise RequestError(f"the chat template cannot render {what}: {error}") from error
