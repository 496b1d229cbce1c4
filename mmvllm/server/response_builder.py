"""Builds OpenAI responses, whole or in chunks, from the engine's deltas."""

import codecs
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mmvllm.engine.detokenizer import special_ids, token_bytes
from mmvllm.outputs import Delta, LogprobsById, RequestOutput
from mmvllm.server.responses import ChatCompletion, Completion, Usage

FINISH_REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length"}
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
    logprobs: list[LogprobsById] = field(default_factory=list)
    finish_reason: str | None = None
    output: RequestOutput | None = None  # of the request, once it has finished

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.logprobs += delta.logprobs or []
        self.finish_reason = FINISH_REASONS[delta.finish_reason]


class ResponseBuilder:
    """The common part of chat and completion responses; one instance per HTTP request."""

    kind: str
    chunk_kind: str
    id_prefix: str
    prompt_field: str  # of the request

    def __init__(self, model: str, tokenizer: Any, top_logprobs: int | None, prompt_logprobs: int | None = None):
        """Shows the `top_logprobs` most likely tokens for each sampled one; None shows no log-probabilities.

        `prompt_logprobs` is the same for the prompt's tokens, in a field of their own.
        """
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer, self._top_logprobs, self._prompt_logprobs = tokenizer, top_logprobs, prompt_logprobs

    def usage_chunk(self, usage: Usage) -> dict:
        """The last chunk of a stream."""
        return self._head | {"object": self.chunk_kind, "choices": [], "usage": usage.model_dump()}

    def _chunk(self, choice: dict) -> dict:
        return self._head | {"object": self.chunk_kind, "choices": [choice]}

    def _of_prompt(self, output: RequestOutput) -> list[dict | None] | None:
        """The field `prompt_logprobs`, in vLLM's format."""
        if self._prompt_logprobs is None:
            return None
        return [None if found is None else self._shown(found) for found in output.prompt_logprobs]

    def _shown(self, found: LogprobsById) -> dict[str, dict]:
        """The token itself, and as many of the most likely ones as were asked for."""
        items = islice(enumerate(found.items()), self._prompt_logprobs + 1)
        return {
            str(token_id): {
                "logprob": max(logprob, NO_LOGPROB),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for place, (token_id, logprob) in items
            if not place or logprob.rank <= self._prompt_logprobs
        }

    def _top(self, logprobs: dict[int, float]) -> list[tuple[int, float]]:
        """The requested number of most likely tokens, which need not include the sampled one."""
        ranked = sorted(logprobs.items(), key=lambda item: -item[1])
        return ranked[: self._top_logprobs]


class ChatResponseBuilder(ResponseBuilder):
    """Responses of /v1/chat/completions."""

    kind, chunk_kind, id_prefix, prompt_field = "chat.completion", "chat.completion.chunk", "chatcmpl", "messages"

    def whole(self, choices: Sequence[ChoiceBuffer], usage: Usage) -> ChatCompletion:
        """The response to a request that is not streamed."""
        made = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": "".join(choice.text)},
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        prompt_logprobs = self._of_prompt(choices[0].output)
        return ChatCompletion(**self._head, choices=made, usage=usage, prompt_logprobs=prompt_logprobs)

    def first_chunks(self, num_choices: int) -> list[dict]:
        """The chunks that start a stream: the role of each choice."""
        first = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": first, "logprobs": None, "finish_reason": None})
            for index in range(num_choices)
        ]

    def chunk(self, index: int, delta: Delta) -> dict:
        """The chunk for the new tokens of one choice."""
        content = {"content": delta.text} if delta.text else {}
        logprobs = self._logprobs(delta.logprobs or [])
        return self._chunk(
            {
                "index": index,
                "delta": content,
                "logprobs": logprobs,
                "finish_reason": FINISH_REASONS[delta.finish_reason],
            }
        )

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

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        top_logprobs: int | None,
        prompt_logprobs: int | None = None,
        echoes: bool = False,
    ):
        """`echoes`: texts and log-probabilities begin with the prompt's."""
        super().__init__(model, tokenizer, top_logprobs, prompt_logprobs)
        self._echoes = echoes
        self._offsets: dict[int, _OffsetCounter] = {}  # by choice
        self._special_ids = special_ids(tokenizer)

    def whole(self, choices: Sequence[ChoiceBuffer], usage: Usage) -> Completion:
        """The response to a request that is not streamed."""
        made = [
            {
                "index": choice.index,
                "text": self._echo(choice.output) + "".join(choice.text),
                "logprobs": self._logprobs(choice.index, choice.logprobs, choice.output),
                "finish_reason": choice.finish_reason,
                "prompt_logprobs": self._of_prompt(choice.output),
            }
            for choice in choices
        ]
        return Completion(**self._head, choices=made, usage=usage)

    def _echo(self, prompt: RequestOutput | Delta) -> str:
        """The prompt's text, if it is to be repeated and this is its place."""
        if not self._echoes or prompt.prompt_token_ids is None:
            return ""
        data = (token_bytes(self._tokenizer, token_id) for token_id in prompt.prompt_token_ids)
        return b"".join(data).decode(errors="replace")

    def _prompt_entries(self, output: RequestOutput | Delta) -> dict:
        """The log-probabilities of an echoed prompt, whose first token has none; special tokens are text there."""
        ids, found, offset = output.prompt_token_ids, output.prompt_logprobs, _OffsetCounter(frozenset())
        own = [None if entry is None else entry[token_id] for token_id, entry in zip(ids, found, strict=True)]
        return {
            "tokens": [self._token_text(token_id) for token_id in ids],
            "token_logprobs": [None if logprob is None else max(logprob, NO_LOGPROB) for logprob in own],
            "top_logprobs": [None if entry is None else self._top_by_text(entry) for entry in found],
            "text_offset": [offset.advance(token_id, token_bytes(self._tokenizer, token_id)) for token_id in ids],
        }

    def first_chunks(self, _num_choices: int) -> list[dict]:
        """A completion stream has no chunks before the first text."""
        return []

    def chunk(self, index: int, delta: Delta) -> dict:
        """The chunk for the new tokens of one choice."""
        logprobs = self._logprobs(index, delta.logprobs or [], delta)
        return self._chunk(
            {
                "index": index,
                "text": self._echo(delta) + delta.text,
                "logprobs": logprobs,
                "finish_reason": FINISH_REASONS[delta.finish_reason],
            }
        )

    def _logprobs(self, index: int, entries: Sequence[LogprobsById], prompt: RequestOutput | Delta) -> dict | None:
        if self._top_logprobs is None:
            return None
        echo = self._echo(prompt)
        offset = self._offsets.setdefault(index, _OffsetCounter(self._special_ids, len(echo)))
        sampled = [(next(iter(entry)), entry) for entry in entries]
        made = {
            "tokens": [self._token_text(token_id) for token_id, _ in sampled],
            "token_logprobs": [max(entry[token_id], NO_LOGPROB) for token_id, entry in sampled],
            "top_logprobs": [self._top_by_text(entry) for entry in entries],
            "text_offset": [
                offset.advance(token_id, token_bytes(self._tokenizer, token_id)) for token_id, _ in sampled
            ],
        }
        if not echo:
            return made
        echoed = self._prompt_entries(prompt)
        return {name: echoed[name] + made[name] for name in made}

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

    def __init__(self, special_ids: frozenset[int], start: int = 0):
        self._decoder, self._special_ids = codecs.getincrementaldecoder("utf-8")("replace"), special_ids
        self._at = start

    def advance(self, token_id: int, data: bytes) -> int:
        before = self._at
        if token_id not in self._special_ids:
            self._at += len(self._decoder.decode(data))
        return before


def token_text(data: bytes) -> str:
    """A token's text; incomplete UTF-8 is escaped as in OpenAI's API, "bytes:\\xf0\\x9f"."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
