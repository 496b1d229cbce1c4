"""Pydantic models of request fields that several routes share: sampling, conversations, options of processors.

Unknown fields are refused unless they cannot change a completion.
"""

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from mmvllm.errors import RequestError
from mmvllm.processors.chat.parts import plain_processor_kwargs
from mmvllm.processors.chat.template_kwargs import check_template_kwargs
from mmvllm.sampling_params import MAX_LOGPROB_TOKEN_IDS
from mmvllm.server.common.messages import INT64, Ignored, Message, Rate, Size, StrictModel, Unsupported
from mmvllm.server.common.structured import StructuredFields
from mmvllm.server.common.tools import Tools, check_size
from mmvllm.utils.text import some_of

ALL_FRAMES = -1
MAX_RATES = 64
NO_LIMIT = -1  # max_tokens of a completion that only max_model_len limits
MAX_CHOICES = 16  # completions per prompt
MAX_INPUTS = 2048  # inputs per embedding request, as in OpenAI's API
MAX_LOGPROBS = 20
MAX_PARTS = 2048  # messages, content parts and calls of a request: each blocks the event loop for up to 0.01 ms
MAX_STOPS, MAX_STOP_LENGTH = 64, 1000  # length in characters: each new token is compared with every stop string
MAX_STOP_IDS = 1024
MAX_ALLOWED_IDS = 2**18  # more than a vocabulary has; reading them blocks the event loop for 0.1 s
MAX_TEMPLATE = 65_536  # characters
MAX_SALT = 1024  # characters; the prefix cache stores the salt
MAX_TEMPLATE_KWARGS = 16384  # characters as JSON: the template may write them into the prompt
DEFAULT = "Default: the value in the checkpoint's generation_config.json"
ServedModel = Field(None, description="Default: the first name of the served model.")


def _check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        checked = check_template_kwargs(kwargs)
    except RequestError as error:
        reason = str(error).removeprefix(f"{error.param} ")
        raise PydanticCustomError("template_kwargs", "{reason}", {"reason": reason}) from None
    if (length := len(json.dumps(checked))) > MAX_TEMPLATE_KWARGS:
        reason = f"must have at most {MAX_TEMPLATE_KWARGS} characters as JSON, got {length}"
        raise PydanticCustomError("template_kwargs", "{reason}", {"reason": reason})
    return checked


def _check_token_limit(value: int) -> int:
    if value < 1 and value != NO_LIMIT:
        raise PydanticCustomError("token_limit", "must be at least 1, or -1 for no limit")
    return value


def _with_whole_ids(ids: Any) -> Any:
    """Convert token ids that are written as 5.0, an integer in JSON, to int."""
    if not isinstance(ids, list) or float not in set(map(type, ids)):
        return ids
    return [int(one) if isinstance(one, float) and -INT64 < one < INT64 and one.is_integer() else one for one in ids]


_WHOLE_IDS = BeforeValidator(_with_whole_ids)
_TOKEN_ID = re.compile(r"[0-9]{1,18}")


def _check_bias_keys(value: Any) -> Any:
    """Refuse keys that are not token ids, with one error for all of them."""
    if isinstance(value, dict):
        wrong = [key for key in value if isinstance(key, str) and not _TOKEN_ID.fullmatch(key)]
        if wrong:
            reason = f"must have token ids as keys, got {some_of(wrong)}; POST /tokenize converts text to token ids"
            raise PydanticCustomError("token_ids", "{reason}", {"reason": reason})
    return value


# fail_fast: otherwise a long list of invalid items would produce one error per item.
TokenLimit = Annotated[int, Field(lt=INT64), AfterValidator(_check_token_limit)]
Priority = Annotated[int, Field(gt=-INT64, lt=INT64)]
PRIORITY = "Lower numbers run first; other than 0 only if the server has --scheduling-policy priority."
TRUNCATION = "The number of tokens of each prompt to keep; -1: as many as fit beside max_tokens."
TruncationSide = Literal["left", "right"]
TRUNCATION_SIDE = Field(None, description="left (default) keeps the end of a prompt, right its beginning.")
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)]
TokenId = Annotated[int, Field(ge=0, lt=INT64)]
LogprobTokenIds = Annotated[
    list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS), _WHOLE_IDS
]
AllowedTokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_IDS), _WHOLE_IDS]
JsonTokenId = Annotated[str, Field(pattern=f"^{_TOKEN_ID.pattern}$")]  # as a key of an object
LogitBias = Annotated[
    dict[JsonTokenId | TokenId, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_STOP_IDS),
    BeforeValidator(_check_bias_keys),
]
BadWordList = Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)]
StopTokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_IDS), _WHOLE_IDS]
PromptTokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1), _WHOLE_IDS]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateKwargs = Annotated[dict[str, Any], BeforeValidator(check_size), AfterValidator(_check_template_kwargs)]


def check_number_of_parts(messages: Any) -> Any:
    """Refuse messages, or items of the Responses API, that have more than `MAX_PARTS` parts together."""
    if isinstance(messages, list):
        given = [message for message in messages if isinstance(message, dict)]
        contents = [message.get(field) for message in given for field in ("content", "output", "tool_calls")]
        num_parts = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
        if num_parts > MAX_PARTS:
            raise PydanticCustomError("too_many_parts", f"have {num_parts} parts; at most {MAX_PARTS} are accepted")
    return messages


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1), BeforeValidator(check_number_of_parts)]


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="With include_usage: usage so far in every chunk.")
    include_obfuscation: Ignored = None


class ProcessorKwargs(StrictModel):
    """vLLM's arguments for the image and video processors, with their meaning in transformers.

    `size` with `shortest_edge` and `longest_edge` is an alias of `min_pixels` and `max_pixels`; `fps` may be a list
    with a rate for each video.
    """

    fps: Rate | Annotated[list[Rate], Field(fail_fast=True, max_length=MAX_RATES)] | None = Field(
        None, description="Frames to take per second of a video, or of each video."
    )
    num_frames: Size | None = Field(None, description="Frames to take of a video, in place of fps.")
    min_pixels: Size | None = Field(None, description="Replaces the checkpoint's limit for videos and images.")
    max_pixels: Size | None = Field(None, description="Replaces the checkpoint's limit for videos and images.")
    do_sample_frames: bool | None = Field(None, description="false takes all frames of a video.")
    jpeg_draft: bool | None = Field(
        None, description="Decode large JPEGs at a reduced scale, which is faster and changes pixel values."
    )

    @model_validator(mode="before")
    @classmethod
    def _in_one_spelling(cls, value: Any) -> Any:
        try:
            return plain_processor_kwargs(value) if isinstance(value, dict) else value
        except RequestError as error:
            raise PydanticCustomError("processor_kwargs", "{reason}", {"reason": str(error)}) from None


class VideoIoKwargs(StrictModel):
    fps: Rate | None = None
    num_frames: Size | Literal[-1] | None = Field(None, description="-1 takes all frames, or as many as fps selects.")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.fps is not None and self.num_frames not in (None, ALL_FRAMES):
            raise PydanticCustomError("video_io_kwargs", "has both fps and num_frames; give one of them")
        return self

    def as_processor_kwargs(self) -> dict[str, Any]:
        """Return the equivalent fields of `mm_processor_kwargs`."""
        if self.num_frames == ALL_FRAMES:
            return {"do_sample_frames": False} if self.fps is None else {"fps": self.fps}
        return {"fps": self.fps, "num_frames": self.num_frames}


class MediaIoKwargs(StrictModel):
    """vLLM's arguments for reading media, an alias of `mm_processor_kwargs`, which takes precedence."""

    video: VideoIoKwargs | None = None
    image: Ignored = None  # images are RGB in any case
    audio: Ignored = None


class SamplingRequest(StructuredFields):
    """Request fields of all routes that generate completions."""

    model: str | None = ServedModel
    temperature: float | None = Field(None, ge=0, le=2, description=f"{DEFAULT}, else 1.")
    top_p: float | None = Field(None, gt=0, le=1, description=f"{DEFAULT}, else 1.")
    top_k: int | None = Field(None, ge=-1, lt=INT64, description=f"{DEFAULT}, else 0, which keeps all tokens.")
    min_p: float | None = Field(None, ge=0, le=1, description=f"{DEFAULT}, else 0.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description=f"{DEFAULT}, else 0.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description=f"{DEFAULT}, else 0.")
    repetition_penalty: float | None = Field(None, gt=0, le=100, description=f"{DEFAULT}, else 1.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="Completions to generate; the n with the highest log-probability per token are returned.",
    )
    seed: int | None = Field(None, description="Any integer.")
    stop: Stop | Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    min_tokens: int | None = Field(None, ge=0, lt=INT64)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text. Default: true.")
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop string or token in the text.")
    stop_on_repetition: bool | None = Field(
        None, description='End choices that repeat themselves, with finish_reason "repetition".'
    )
    logprob_token_ids: LogprobTokenIds | None = Field(
        None, description="With logprobs: tokens whose log-probabilities are shown, in place of the most likely ones."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Most likely tokens shown for each token of the prompt; not streamed."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWordList | None = None
    no_repeat_ngram_size: int | None = Field(None, ge=0, lt=INT64)
    # Extensions of vLLM.
    priority: Priority | None = Field(None, description=PRIORITY)
    use_beam_search: bool | None = Field(None, description="Beam search with beam_width, else best_of, else n beams.")
    beam_width: int | None = Field(None, ge=1, lt=INT64, description="Beam search with this many beams.")
    length_penalty: float | None = Field(None, ge=-10, le=10, description="For beam search. Default: 1.")
    early_stopping: bool | Literal["never"] | None = Field(None, description="For beam search. Default: false.")
    truncate_prompt_tokens: Literal[-1] | None = None  # no effect: a prompt that does not fit is refused
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name tokens by their ids, "token_id:5", in log-probabilities.'
    )
    return_token_ids: bool | None = Field(None, description="Add the token ids of the prompt and of each completion.")
    logits_processors: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    kv_transfer_params: Unsupported = None
    vllm_xargs: Unsupported = None
    spaces_between_special_tokens: Ignored = None
    add_special_tokens: Ignored = None  # the tokenizers add none
    request_id: Ignored = None


class ChatPrompt(StrictModel):
    """Request fields from which a prompt is built."""

    messages: Messages
    tools: Tools | None = None
    cache_salt: str | None = Field(
        None, max_length=MAX_SALT, description="The prefix cache is shared only among requests with the same salt."
    )
    min_pixels: int | None = Field(None, ge=1, lt=INT64, description="Smaller images are enlarged to this many pixels.")
    max_pixels: int | None = Field(
        None, ge=1, lt=INT64, description="Replaces the limit of detail auto and high; larger images are scaled down."
    )
    allow_special_tokens: bool | None = Field(
        None,
        description="Special tokens in messages are control tokens, not text; only if the server has "
        "--allow-special-tokens.",
    )
    mm_processor_kwargs: ProcessorKwargs | None = None
    chat_template_kwargs: TemplateKwargs | None = Field(
        None, description="Arguments of the chat template, such as enable_thinking; they override the server's."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="Passed to the chat template as reasoning_effort, with enable_thinking true; none only sets "
        "enable_thinking to false. chat_template_kwargs take precedence.",
    )
    media_io_kwargs: MediaIoKwargs | None = None
    add_generation_prompt: bool | None = Field(
        None, description="End the prompt with the beginning of an answer. Default: unless continue_final_message."
    )
    continue_final_message: bool | None = Field(
        None, description="End the prompt with the text of the final message, which the model continues."
    )
    chat_template: str | None = Field(
        None,
        max_length=MAX_TEMPLATE,
        description="A Jinja template in place of the checkpoint's; only if the server has "
        "--trust-request-chat-template.",
    )

    @model_validator(mode="after")
    def _take_media_io_kwargs(self) -> Self:
        video = self.media_io_kwargs.video if self.media_io_kwargs else None
        kwargs = self.mm_processor_kwargs or ProcessorKwargs()
        if video is not None and kwargs.fps is kwargs.num_frames is kwargs.do_sample_frames is None:
            self.mm_processor_kwargs = kwargs.model_copy(update=video.as_processor_kwargs())
        return self


def prompt_tag(prompt: Any) -> str:
    """Return the shape of prompt that the client meant, so that errors refer to it."""
    if not isinstance(prompt, list):
        return "a string"
    tags = {int: "token ids", float: "token ids", list: "lists of ids"}
    return tags.get(type(prompt[0]), "strings") if prompt else "strings"
