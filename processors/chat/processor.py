"""Prepare requests: render the chat template, load images and videos, and expand their placeholders."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mmvllm.errors import RequestError
from mmvllm.inputs import EngineInput, MediaRules, MultiModalInput
from mmvllm.processors.chat.length_limit import LengthLimit
from mmvllm.processors.chat.parts import naming_media
from mmvllm.processors.chat.requests import ParsedRequest, parse_request
from mmvllm.processors.chat.special_tokens import SpecialTokens, splitting
from mmvllm.processors.chat.template import ChatTemplate
from mmvllm.processors.chat.tools import for_template
from mmvllm.processors.images.processor import ImageProcessor, SourceGeometry, draft_for, resize_for_part
from mmvllm.processors.placeholders import place_media
from mmvllm.processors.tensors import own_token_ids
from mmvllm.processors.videos.clip import Clip
from mmvllm.processors.videos.load import DIRECT, Load
from mmvllm.processors.videos.processor import ClipPlan, VideoProcessor, VideoProcessorConfig
from mmvllm.utils.text import with_whole_characters


def tokenize(tokenizer, text: str) -> list[int]:
    """Tokenize a text as it is; its special tokens become control tokens."""
    with splitting():  # not verbose: mmvllm refuses a text that is too long for the model with another message
        return tokenizer(with_whole_characters(text), add_special_tokens=False, verbose=False)["input_ids"]


class Processor:
    """mmvllm's request processor; token ids, grids and pixel values equal the outputs of transformers' processor.

    Special tokens in messages and `chat_template_kwargs` are encoded as text, unless the request has
    `allow_special_tokens`.

    Args:
        rules: the rules of the model's family; None for a text-only checkpoint.
        video_processor: if None, requests with videos are refused.
        max_tokens: a text or a video with this many tokens or more is refused before it is tokenized or decoded.
        load: the functions that load media, unless a call passes others.
    """

    def __init__(
        self,
        tokenizer,
        image_processor: ImageProcessor,
        rules: MediaRules | None,
        video_processor: VideoProcessor | None = None,
        max_tokens: int | None = None,
        load: Load = DIRECT,
    ):
        self.tokenizer, self.image_processor, self.rules = tokenizer, image_processor, rules
        self.video_processor = video_processor
        self.max_tokens, self.load = max_tokens, load
        self._special_tokens = SpecialTokens(tokenizer)
        self._length_limit = None if max_tokens is None else LengthLimit.of(tokenizer, max_tokens)
        self.chat_template = ChatTemplate(tokenizer, rules)
        self._lock = threading.Lock()  # fast tokenizers are not thread-safe

    def __reduce__(self):
        """Pickle everything but the lock; the other process creates a new one."""
        return Processor, (
            self.tokenizer,
            self.image_processor,
            self.rules,
            self.video_processor,
            self.max_tokens,
            self.load,
        )

    def __call__(self, request: dict, load: Load | None = None) -> EngineInput:
        """Prepare one request; raises RequestError that says what is wrong, and where."""
        return self.together([request], load)[0]

    def together(self, requests: list[dict], load: Load | None = None) -> list[EngineInput]:
        """Prepare requests that share their images and videos, which are loaded once from the first request."""
        first, *others = [self._parsed(request) for request in requests]
        media = self._media(first, load or self.load)
        return [self._placed(parsed, media) for parsed in (first, *others)]

    def _parsed(self, request: dict) -> ParsedRequest:
        parsed = parse_request(request)
        check_takes_media(parsed, self.rules)
        if parsed.videos and self.video_processor is None:
            raise RequestError("this processor was made without a video_processor, it cannot take videos")
        if parsed.truncation is not None and (parsed.images or parsed.videos):
            raise RequestError(
                "truncate_prompt_tokens cannot be used with images and videos, whose placeholders it would cut off",
                param="truncate_prompt_tokens",
            )
        return parsed

    def _media(self, parsed: ParsedRequest, load: Load) -> list[MultiModalInput]:
        media = [self._image(i, part, parsed, load) for i, part in enumerate(parsed.images)]
        return media + [self._video(i, part, parsed, load) for i, part in enumerate(parsed.videos)]

    def _placed(self, parsed: ParsedRequest, media: list[MultiModalInput]) -> EngineInput:
        text = None
        if (token_ids := parsed.token_ids) is None:
            text, marked = self._rendered(parsed)
        with self._lock:
            token_ids = self._tokenized(text, marked) if token_ids is None else own_token_ids(token_ids)
            if parsed.truncation is not None:
                token_ids = parsed.truncation.cut(token_ids)
            if self.rules is None:
                return EngineInput(token_ids, text=text)
            made = place_media(token_ids, media, self.rules, partial(tokenize, self.tokenizer))
            return replace(made, text=text)

    def _rendered(self, parsed: ParsedRequest) -> tuple[str, str | None]:
        if parsed.truncation is None or self._length_limit is None:
            return rendered(parsed, self.chat_template, self._special_tokens, self._length_limit)
        text = self._length_limit.cut(parsed.text, parsed.truncation)
        return rendered(parsed._replace(text=text), self.chat_template, self._special_tokens)

    def _tokenized(self, text: str, marked: str | None) -> list[int]:
        return tokenize(self.tokenizer, text) if marked is None else self._special_tokens.token_ids(marked)

    def _image(self, i: int, part: dict, parsed: ParsedRequest, load: Load) -> MultiModalInput:
        with naming_media(image_index=i):
            config = self.image_processor.config
            draft = [draft_for(config, part, *parsed.image_bounds)] if parsed.jpeg_draft else []
            image = load.image(part["image"], *draft)
            made = self.image_processor(resize_for_part(image, part, config.factor), *parsed.image_bounds)
            return replace(made, geometry=SourceGeometry.of(image).resized_to(made.grid, config.patch_size))

    def _video(self, i: int, part: dict, parsed: ParsedRequest, load: Load) -> MultiModalInput:
        with naming_media(video_index=i):
            config, max_tokens = self.video_processor.config, self.max_tokens
            return self.video_processor(load_clip(load, part, parsed.video_kwargs[i], config, max_tokens))


def load_clip(
    load: Load, part: dict, kwargs: Mapping[str, Any], config: VideoProcessorConfig, max_tokens: int | None
) -> Clip:
    """Load the frames of a video that its part and the request's arguments select, with their times."""
    keys = {key: value for key, value in part.items() if key != "video"}
    plan = ClipPlan(config, **kwargs, part=keys, max_tokens=max_tokens)
    return plan.timed(load.video(part["video"], plan))


def check_takes_media(parsed: ParsedRequest, rules: MediaRules | None) -> None:
    if (parsed.images or parsed.videos) and rules is None:
        raise RequestError(f"this checkpoint is text-only, it cannot take {'images' if parsed.images else 'videos'}")
    if parsed.videos and not rules.takes_videos:
        raise RequestError("this checkpoint has no token for videos, it cannot take them")


def rendered(
    parsed: ParsedRequest,
    template: ChatTemplate,
    special_tokens: SpecialTokens,
    length_limit: LengthLimit | None = None,
) -> tuple[str, str | None]:
    """Return the text to tokenize and, if special tokens of messages are to be encoded as text, a text that marks them.

    Raises PromptTooLong for a text that cannot fit, even if a template has generated it from short messages.
    """

    def checked(text: str) -> str:
        if length_limit is not None:
            length_limit.check(text)
        return text

    def apply(given: tuple[list[dict], dict]) -> str:
        return checked(template.render(*given, parsed.template_options))

    if parsed.messages is None:
        return checked(with_whole_characters(parsed.text)), None
    if parsed.chat_template is not None:
        template = template.replaced_by(parsed.chat_template)
    messages, tools = for_template(parsed.messages, parsed.tools, template.reads_tools)
    given = with_whole_characters([messages, {**parsed.template_kwargs, **tools}])
    if parsed.allow_special_tokens:
        return apply(given), None
    return special_tokens.render(apply, given)
