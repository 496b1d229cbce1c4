"""Requests -> `EngineInput`: chat template, images and videos, and their placeholders expanded."""

import threading
from functools import partial
from typing import Any

from PIL.Image import Image

from mmvllm.errors import RequestError
from mmvllm.inputs import EngineInput, Media, MediaRules
from mmvllm.processors.image import ImageProcessor, resize_for_part
from mmvllm.processors.load_video import DIRECT, Load
from mmvllm.processors.parts import naming_media
from mmvllm.processors.placeholders import expand_placeholders, place_media
from mmvllm.processors.requests import ParsedRequest, parse_request
from mmvllm.processors.special_tokens import SpecialTokens, check_unicode
from mmvllm.processors.tensors import media_from_tensors, own_grids, own_token_ids
from mmvllm.processors.video import ClipPlan, VideoProcessor
from mmvllm.text import counted


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
        video_processor: without one, requests with videos are refused.
        max_tokens: a video that alone has more is refused before it is decoded.
    """

    def __init__(
        self,
        tokenizer,
        image_processor: ImageProcessor,
        rules: MediaRules | None,
        video_processor: VideoProcessor | None = None,
        max_tokens: int | None = None,
    ):
        self.tokenizer, self.image_processor, self.rules = tokenizer, image_processor, rules
        self.video_processor = video_processor if rules and rules.video_token_id is not None else None
        self.max_tokens = max_tokens
        self._special_tokens = SpecialTokens(tokenizer)
        self._lock = threading.Lock()  # a fast tokenizer may not be used by two threads at once

    def __reduce__(self):
        """A processor in another process gets a lock of its own."""
        return Processor, (self.tokenizer, self.image_processor, self.rules, self.video_processor, self.max_tokens)

    def __call__(self, request: dict, load: Load = DIRECT) -> EngineInput:
        """Prepare one request; raises RequestError that says what is wrong, and where."""
        parsed = parse_request(request)
        _check_takes_media(parsed, self.rules)
        if parsed.videos and self.video_processor is None:
            raise RequestError("this checkpoint has no token for videos, it cannot take them", video_index=0)
        if self.rules is None and parsed.messages:
            parsed = parsed._replace(messages=[_as_string(message) for message in parsed.messages])
        media = [self._image(i, part, parsed, request, load) for i, part in enumerate(parsed.images)]
        media += [self._video(i, part, parsed, load) for i, part in enumerate(parsed.videos)]
        with self._lock:
            token_ids = self._token_ids(parsed)
            if self.rules is None:
                return EngineInput(token_ids)
            return place_media(token_ids, media, self.rules, partial(tokenize, self.tokenizer))

    def _token_ids(self, parsed: ParsedRequest) -> list[int]:
        if parsed.token_ids is not None:
            return own_token_ids(parsed.token_ids)
        text, marked = _text(parsed, self.tokenizer, self._special_tokens)
        return tokenize(self.tokenizer, text) if marked is None else self._special_tokens.token_ids(marked)

    def _image(self, i: int, part: dict, parsed: ParsedRequest, request: dict, load: Load) -> Media:
        with naming_media(image_index=i):
            image = resize_for_part(load.image(part["image"]), part, self.image_processor.config.factor)
            return self.image_processor(image, *_image_bounds(request, parsed))

    def _video(self, i: int, part: dict, parsed: ParsedRequest, load: Load) -> Media:
        with naming_media(video_index=i):
            plan = self._plan(part, parsed)
            return self.video_processor(plan.timed(load.video(part["video"], plan)))

    def _plan(self, part: dict, parsed: ParsedRequest) -> ClipPlan:
        keys = {key: value for key, value in part.items() if key != "video"}
        return ClipPlan(self.video_processor.config, **parsed.processor_kwargs, part=keys, max_tokens=self.max_tokens)


def _image_bounds(request: dict, parsed: ParsedRequest) -> tuple[int | None, int | None]:
    """The request's `min_pixels` and `max_pixels` for images."""
    return tuple(request.get(name) or parsed.processor_kwargs.get(name) for name in ("min_pixels", "max_pixels"))


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

    def __call__(self, request: dict, load: Load = DIRECT) -> EngineInput:
        """Prepare one request; raises RequestError that says what is wrong, and with which image."""
        parsed = parse_request(request)
        _check_takes_media(parsed, self.rules)
        if parsed.videos:
            raise RequestError("a processor of your own cannot take videos; leave it out", video_index=0)
        images = [self._image(i, part, parsed, request, load) for i, part in enumerate(parsed.images)]
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

    def _image(self, i: int, part: dict, parsed: ParsedRequest, request: dict, load: Load) -> Image:
        bounds = dict(zip(("min_pixels", "max_pixels"), _image_bounds(request, parsed), strict=True))
        with naming_media(image_index=i):
            image = resize_for_part(load.image(part["image"]), part, self.factor)
            return resize_for_part(image, bounds, self.factor)

    def _engine_input(self, made, num_images: int) -> EngineInput:
        token_ids = own_token_ids(_returned(made, "input_ids")[0])
        if self.rules is None:
            return EngineInput(token_ids)
        grids = own_grids(_returned(made, "image_grid_thw"), self.rules.merge_size) if num_images else []
        if len(grids) != num_images:
            raise RequestError(f"the processor returned {len(grids)} image_grid_thw for {counted(num_images, 'image')}")
        media = media_from_tensors("image", self.rules, _returned(made, "pixel_values"), grids) if num_images else []
        return place_media(token_ids, media, self.rules, partial(tokenize, self.tokenizer))


def _returned(made, name: str) -> Any:
    if name not in made:
        raise RequestError(f"the processor returned no {name}, only {', '.join(made) or 'an empty dict'}")
    return made[name]


def _check_takes_media(parsed: ParsedRequest, rules: MediaRules | None) -> None:
    if (parsed.images or parsed.videos) and rules is None:
        raise RequestError(f"this checkpoint is text-only, it cannot take {'images' if parsed.images else 'videos'}")


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
