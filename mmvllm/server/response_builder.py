"""Builds OpenAI responses, whole or in chunks, from the engine's deltas."""

import codecs
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mmvllm.engine.detokenizer import special_ids, token_bytes
from mmvllm.grounding import Box, Point
from mmvllm.outputs import Delta, RequestOutput
from mmvllm.processors.tool_calls import CallPiece, ToolCallParser, read_tool_calls
from mmvllm.server.errors import ApiError
from mmvllm.server.responses import ChatCompletion, Completion, Usage

FINISH_REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length", "repetition": "repetition"}
NO_LOGPROB = -9999.0  # JSON has no infinity


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Total token counts over all prompts and completions."""
    prompt = sum(output.num_prompt_tokens for output in outputs)
    completion = sum(len(one.token_ids) for output in outputs for one in output.completions)
    details = {
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "image_tokens": sum(output.num_image_tokens for output in outputs),
        "video_tokens": sum(output.num_video_tokens for output in outputs),
    }
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=details,
    )


class RunningUsage:
    """Token counts while a response is streamed, as vLLM's `continuous_usage_stats` reports them."""

    def __init__(self, choices_per_prompt: int):
        self._choices_per_prompt = choices_per_prompt
        self._prompt_tokens: dict[int, int] = {}  # by prompt
        self._completion_tokens = 0

    def add(self, index: int, delta: Delta) -> dict[str, int]:
        """Count the delta of a choice; return the counts so far."""
        self._prompt_tokens[index // self._choices_per_prompt] = delta.num_prompt_tokens
        self._completion_tokens += len(delta.token_ids)
        prompt, completion = sum(self._prompt_tokens.values()), self._completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclass(slots=True)
class ChoiceBuffer:
    """The deltas of one choice received so far."""

    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[dict] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    boxes: tuple[Box | Point, ...] = ()

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.prompt_token_ids = delta.prompt_token_ids
        self.logprobs += delta.logprobs or []
        self.finish_reason = FINISH_REASONS[delta.finish_reason]
        self.boxes = delta.boxes


class ResponseBuilder:
    """The common part of chat and completion responses; one instance per HTTP request."""

    kind: str
    chunk_kind: str
    id_prefix: str
    prompt_field: str  # of the request
    end: str | None = "[DONE]"  # of a stream

    def __init__(self, model: str, tokenizer: Any, top_logprobs: int | None, returns_token_ids: bool = False):
        """Shows the `top_logprobs` most likely tokens for each sampled one; None shows no log-probabilities."""
        self.model = model
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer, self._top_logprobs = tokenizer, top_logprobs
        self._returns_token_ids = returns_token_ids

    @property
    def id(self) -> str:
        return self._head["id"]

    def last_chunks(self, usage: Usage, includes_usage: bool) -> list[dict]:
        """The chunks that end a stream."""
        chunk = self._head | {"object": self.chunk_kind, "choices": [], "usage": usage.model_dump()}
        return [chunk] if includes_usage else []

    def error_chunk(self, error: ApiError) -> dict:
        """The chunk that ends a stream with an error."""
        return error.content()

    def _chunk(self, choice: dict) -> dict:
        return self._head | {"object": self.chunk_kind, "choices": [choice]}

    def _token_ids(self, token_ids: list[int]) -> dict[str, list[int]]:
        return {"token_ids": token_ids} if self._returns_token_ids else {}

    def _prompt_token_ids(self, token_ids: list[int] | None) -> dict[str, list[int]]:
        return {"prompt_token_ids": token_ids} if self._returns_token_ids else {}

    def _top(self, logprobs: dict[int, float]) -> list[tuple[int, float]]:
        """The requested number of most likely tokens, which need not include the sampled one."""
        ranked = sorted(logprobs.items(), key=lambda item: -item[1])
        return ranked[: self._top_logprobs]


class ChatResponseBuilder(ResponseBuilder):
    """Responses of /v1/chat/completions."""

    kind, chunk_kind, id_prefix, prompt_field = "chat.completion", "chat.completion.chunk", "chatcmpl", "messages"

    def __init__(self, *args: Any, functions: Collection[str] = (), boxes: bool | Literal["stored"] | None = None):
        """`functions` are the names of those whose calls are looked for in completions; with `boxes`, each choice has
        those that the model wrote: "stored" in pixels of the image as it is stored. Others are as of the base.
        """
        super().__init__(*args)
        self._functions, self._with_boxes = functions, boxes
        self._parsers: dict[int, ToolCallParser] = {}  # by choice

    def whole(self, choices: Sequence[ChoiceBuffer], usage: Usage) -> ChatCompletion:
        """The response to a request that is not streamed."""
        made = [self._choice(choice) for choice in choices]
        return ChatCompletion(
            **self._head, choices=made, usage=usage, **self._prompt_token_ids(choices[0].prompt_token_ids)
        )

    def _choice(self, choice: ChoiceBuffer) -> dict:
        text, message = "".join(choice.text), {"role": "assistant"}
        content, calls = read_tool_calls(text, self._functions) if self._functions else (text, [])
        if calls:
            message["tool_calls"] = [
                {"id": call_id(), "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        return {
            "index": choice.index,
            "message": message | {"content": content or None if calls else content},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": _reason(choice.finish_reason, bool(calls)),
            **self._token_ids(choice.token_ids),
            **self._extras(choice.boxes),
        }

    def first_chunks(self, num_choices: int, delta: Delta) -> list[dict]:
        """The chunks that start a stream, before the first delta: the role of each choice."""
        first = {"role": "assistant", "content": ""}
        ids = self._prompt_token_ids(delta.prompt_token_ids)
        return [
            self._chunk({"index": index, "delta": first, "logprobs": None, "finish_reason": None}) | ids
            for index in range(num_choices)
        ]

    def chunks(self, index: int, delta: Delta) -> list[dict]:
        """The chunks for the new tokens of one choice: none while their text may belong to the mark of a call."""
        parts, has_calls = self._parts(index, delta)
        others = {"logprobs": self._logprobs(delta.logprobs or []), **self._token_ids(delta.token_ids)}
        reason = _reason(FINISH_REASONS[delta.finish_reason], has_calls)
        if not parts and reason is None and not any(others.values()):
            return []
        *first, last = parts or [{}]
        made = [{"index": index, "delta": part, "logprobs": None, "finish_reason": None} for part in first]
        if delta.finish_reason is not None:
            others |= self._extras(delta.boxes)
        return [
            *map(self._chunk, made),
            self._chunk({"index": index, "delta": last, **others, "finish_reason": reason}),
        ]

    def _parts(self, index: int, delta: Delta) -> tuple[list[dict], bool]:
        """What is new of the message, and whether it has calls."""
        if not self._functions:
            return [{"content": delta.text}] if delta.text else [], False
        parser = self._parsers.setdefault(index, ToolCallParser(self._functions))
        pieces = parser.feed(delta.text, is_last=delta.finish_reason is not None)
        parts = [{"content": one} if isinstance(one, str) else {"tool_calls": [_call_part(one)]} for one in pieces]
        return parts, parser.num_calls > 0

    def _extras(self, boxes: Sequence[Box | Point]) -> dict[str, Any]:
        """The field of a whole choice that only mmvllm has, if the request asks for it."""
        if not self._with_boxes:
            return {}
        shown = (box.in_stored_pixels() for box in boxes) if self._with_boxes == "stored" else boxes
        return {"mmvllm": {"boxes": [box.to_dict() for box in shown]}}

    def _logprobs(self, entries: Sequence[dict[int, float]]) -> dict | None:
        if self._top_logprobs is None:
            return None
        made = []
        for logprobs in entries:
            sampled, logprob = next(iter(logprobs.items()))
            top = [self._entry(*item) for item in self._top(logprobs)]
            made.append(self._entry(sampled, logprob) | {"top_logprobs": top})
        return {"content": made}

    def _entry(self, token_id: int, logprob: float) -> dict:
        data = token_bytes(self._tokenizer, token_id)
        return {"token": token_text(data), "logprob": max(logprob, NO_LOGPROB), "bytes": list(data)}


class CompletionResponseBuilder(ResponseBuilder):
    """Responses of /v1/completions."""

    kind, chunk_kind, id_prefix, prompt_field = "text_completion", "text_completion", "cmpl", "prompt"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._offsets: dict[int, _OffsetCounter] = {}  # by choice
        self._special_ids = special_ids(self._tokenizer)
        self._begun: set[int] = set()  # choices that have a chunk

    def whole(self, choices: Sequence[ChoiceBuffer], usage: Usage) -> Completion:
        """The response to a request that is not streamed."""
        made = [
            {
                "index": choice.index,
                "text": "".join(choice.text),
                "logprobs": self._logprobs(choice.index, choice.logprobs),
                "finish_reason": choice.finish_reason,
                **self._prompt_token_ids(choice.prompt_token_ids),
                **self._token_ids(choice.token_ids),
            }
            for choice in choices
        ]
        return Completion(**self._head, choices=made, usage=usage)

    def first_chunks(self, _num_choices: int, _delta: Delta) -> list[dict]:
        """A completion stream has no chunks before the first text."""
        return []

    def chunks(self, index: int, delta: Delta) -> list[dict]:
        """The chunk for the new tokens of one choice; the first one of a choice has the ids of its prompt."""
        prompt_ids = {} if index in self._begun else self._prompt_token_ids(delta.prompt_token_ids)
        self._begun.add(index)
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, delta.logprobs or []),
            "finish_reason": FINISH_REASONS[delta.finish_reason],
        }
        return [self._chunk(choice | prompt_ids | self._token_ids(delta.token_ids))]

    def _logprobs(self, index: int, entries: Sequence[dict[int, float]]) -> dict | None:
        if self._top_logprobs is None:
            return None
        offset = self._offsets.setdefault(index, _OffsetCounter(self._special_ids))
        sampled = [(next(iter(entry)), entry) for entry in entries]
        return {
            "tokens": [self._token_text(token_id) for token_id, _ in sampled],
            "token_logprobs": [max(entry[token_id], NO_LOGPROB) for token_id, entry in sampled],
            "top_logprobs": [self._top_by_text(entry) for entry in entries],
            "text_offset": [
                offset.advance(token_id, token_bytes(self._tokenizer, token_id)) for token_id, _ in sampled
            ],
        }

    def _top_by_text(self, logprobs: dict[int, float]) -> dict[str, float]:
        """Includes the sampled token; of tokens with the same text, the most likely one is shown."""
        sampled = next(iter(logprobs.items()))
        made: dict[str, float] = {}
        for token_id, logprob in [*self._top(logprobs), sampled]:
            made.setdefault(self._token_text(token_id), max(logprob, NO_LOGPROB))
        return made

    def _token_text(self, token_id: int) -> str:
        return token_text(token_bytes(self._tokenizer, token_id))


class _OffsetCounter:
    """Character offset of each token in the text of a completion, to which special tokens contribute nothing."""

    def __init__(self, special_ids: frozenset[int]):
        self._decoder, self._at, self._special_ids = codecs.getincrementaldecoder("utf-8")("replace"), 0, special_ids

    def advance(self, token_id: int, data: bytes) -> int:
        before = self._at
        if token_id not in self._special_ids:
            self._at += len(self._decoder.decode(data))
        return before


def call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def _call_part(piece: CallPiece) -> dict:
    """A piece of a call as OpenAI's chunks have it: with the id and the name first."""
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": call_id(), "type": "function", "function": function}


def _reason(finish_reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason


def token_text(data: bytes) -> str:
    """A token's text; incomplete UTF-8 is escaped as in OpenAI's API, "bytes:\\xf0\\x9f"."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
