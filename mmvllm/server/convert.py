"""OpenAI's requests -> the engine's."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmvllm.processors.image import ImageProcessorConfig
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from mmvllm.server.protocol import ChatRequest, CompletionRequest, ImagePart, Message, SamplingRequest, TextPart

LOW_TOKENS, AUTO_TOKENS = 256, 1280  # image tokens of a picture with this detail, at most
COMPLETION_TOKENS = 16

# The engine's defaults are others: it is greedy. What is missing here is the same in both.
PASSED_ON = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("n", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most pixels a picture is resized to, by the detail that is asked for."""

    low: int
    auto: int
    high: int

    @classmethod
    def of(cls, config: ImageProcessorConfig, auto: int | None = None) -> "Bounds":
        """Those of a checkpoint, with the operator's own for `auto`."""
        token = config.factor**2
        auto = auto or min(config.max_pixels, AUTO_TOKENS * token)
        return cls(min(LOW_TOKENS * token, auto), auto, max(config.max_pixels, auto))

    def cap(self, detail: str | None, asked: int | None) -> int:
        """`asked` is the request's own bound: instead of that of auto and high, and no less strict than that of low."""
        if detail == "low":
            return min(self.low, asked or self.low)
        return asked or (self.high if detail == "high" else self.auto)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a request: `param` says where in it."""

    param: str
    url: str
    detail: str | None


def pictures(body: ChatRequest) -> list[Picture]:
    """In the order in which the model sees them."""
    return [
        Picture(f"messages[{i}].content[{j}].image_url.url", part.image_url.url, part.image_url.detail)
        for i, message in enumerate(body.messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def caps(body: ChatRequest, pictures: Sequence[Picture], bounds: Bounds) -> list[int]:
    """The most pixels of each picture; raises ApiError for bounds that cannot be kept."""
    for name in ("min_pixels", "max_pixels"):
        value = getattr(body, name)
        if value is not None and value > bounds.high:  # nobody may have small pictures made huge
            raise ApiError(400, f"{name} is {value}, must be at most {bounds.high} here", param=name)
    found = [bounds.cap(picture.detail, body.max_pixels) for picture in pictures]
    if body.min_pixels is not None and found and body.min_pixels > min(found):
        message = f"min_pixels is {body.min_pixels}, above the {min(found)} that detail and max_pixels allow"
        raise ApiError(400, message, param="min_pixels")
    return found


def chat_request(body: ChatRequest, data: Sequence[bytes], caps: Sequence[int]) -> dict:
    """The engine's request, with what was fetched for `pictures(body)` and their `caps`.

    If all pictures have the same cap it is the request's, as in a request to `LLM.generate_multimodal`; a picture with
    a smaller one brings that with it.
    """
    largest = max(caps, default=None)
    parts = (
        {"type": "image", "image": image} | ({"max_pixels": cap} if cap < largest else {})
        for image, cap in zip(data, caps, strict=True)
    )
    request = {"messages": [_message(message, parts) for message in body.messages], "cache_salt": body.cache_salt}
    return request | ({"min_pixels": body.min_pixels, "max_pixels": largest} if caps else {})


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """Refuses texts that cannot fit before anyone spends time on tokenizing them."""

    max_model_len: int
    max_token_length: int  # in characters

    @classmethod
    def of(cls, tokenizer: Any, max_model_len: int) -> "LengthLimit":
        return cls(max_model_len, max(map(len, tokenizer.get_vocab())))

    def check(self, param: str, prompts: Iterable[str | list[int]], num_more: int = 0) -> None:
        """Raises ApiError for a prompt that is too long however its text is cut into tokens, with `num_more` others."""
        for prompt in prompts:
            least = num_more + (-(-len(prompt) // self.max_token_length) if isinstance(prompt, str) else len(prompt))
            if least >= self.max_model_len:
                message = f"the prompt has at least {least} tokens, max_model_len is {self.max_model_len}; shorten it"
                raise ApiError(400, message, param=param, code=CONTEXT_LENGTH_EXCEEDED)


def texts(body: ChatRequest) -> Iterator[str]:
    """All that is said in a conversation."""
    for message in body.messages:
        if isinstance(message.content, str):
            yield message.content
        else:
            yield from (part.text for part in message.content if isinstance(part, TextPart))


def _message(message: Message, images: Iterator[dict]) -> dict:
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    texts_and_images = [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else next(images) for part in message.content
    ]
    return {"role": role, "content": texts_and_images}


def prompts(body: CompletionRequest) -> list[str | list[int]]:
    """One or several, given in any of four shapes."""
    if isinstance(body.prompt, str) or isinstance(body.prompt[0], int):
        return [body.prompt]
    return body.prompt


def chat_params(body: ChatRequest, max_model_len: int) -> SamplingParams:
    """How to answer; without a bound of its own, a request gets as many tokens as fit."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    given = {body.max_completion_tokens, body.max_tokens} - {None}
    if len(given) == 2:
        message = "max_completion_tokens and max_tokens are two names of one thing; give one of them"
        raise ApiError(400, message, param="max_tokens")
    max_tokens = given.pop() if given else max_model_len
    return _params(body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)


def completion_params(body: CompletionRequest) -> SamplingParams:
    """How to go on from the prompts."""
    return _params(body, COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens, body.logprobs)


def _params(body: SamplingRequest, max_tokens: int, logprobs: int | None) -> SamplingParams:
    given = {name: value for name in PASSED_ON if (value := getattr(body, name)) is not None}
    try:
        return SamplingParams(**{"temperature": 1.0} | given, max_tokens=max_tokens, logprobs=logprobs)
    except ValueError as error:  # of what the schema cannot say: one field's bound depends on another
        raise ApiError(400, str(error), param=str(error).partition(" ")[0]) from None
