"""Code that the builders of OpenAI responses share: deltas of a choice, token counts, fields about the prompt."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mmvllm.grounding import Box, Point
from mmvllm.outputs import Delta, LogprobsById, RequestOutput
from mmvllm.scheduler.detokenizer import token_bytes
from mmvllm.server.common.response_models import PromptLogprob, Usage
from mmvllm.server.errors import ApiError

FINISH_REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length", "repetition": "repetition"}
NO_LOGPROB = -9999.0  # JSON has no infinity
MAX_LOGPROBS_OF_RESPONSE = 2**17  # including the likely tokens beside each; validating them takes a second


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Return the total token counts of all prompts and completions."""
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
    """Counts tokens while a response is streamed, for vLLM's `continuous_usage_stats`."""

    def __init__(self, choices_per_prompt: int):
        self._choices_per_prompt = choices_per_prompt
        self._prompt_tokens: dict[int, int] = {}  # by prompt
        self._completion_tokens = 0

    def count_prompt(self, index: int, delta: Delta) -> dict[str, int]:
        """Count the prompt of a choice before its first token; return the counts so far."""
        self._prompt_tokens[index // self._choices_per_prompt] = delta.num_prompt_tokens
        prompt, completion = sum(self._prompt_tokens.values()), self._completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def add(self, index: int, delta: Delta) -> dict[str, int]:
        """Count the delta of a choice; return the counts so far."""
        self._completion_tokens += len(delta.token_ids)
        return self.count_prompt(index, delta)


@dataclass(slots=True)
class ChoiceBuffer:
    """The deltas of one choice received so far."""

    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[LogprobsById] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    boxes: tuple[Box | Point, ...] = ()
    output: RequestOutput | None = None  # set when the request has finished

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.finish_reason, self.stop_reason = FINISH_REASONS[delta.finish_reason], delta.stop_reason
        self.boxes = delta.boxes


class ResponseBuilder:
    """The common part of chat and completion responses; one instance per HTTP request."""

    kind: str
    chunk_kind: str
    id_prefix: str
    prompt_field: str  # the request field with the prompt
    logprobs_field = "logprobs"  # the request field for the number of log-probabilities
    repeats_prompt = True  # whether every choice has the log-probabilities of the prompt
    end: str | None = "[DONE]"  # data that ends a stream

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        top_logprobs: int | None,
        prompt_logprobs: int | None = None,
        returns_token_ids: bool = False,
        names_tokens_by_id: bool = False,
        shows_times: bool = False,
    ):
        """Show the `top_logprobs` most likely tokens for each sampled one; None shows no log-probabilities.

        `prompt_logprobs` does the same for the prompt's tokens, in a separate field. `names_tokens_by_id` shows
        "token_id:5" in place of texts, which several tokens may share. `shows_times` adds `RequestTimes` to the
        response, or to the last chunk with the usage, if there is one choice.
        """
        self.model = model
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
            "service_tier": None,
            "system_fingerprint": None,
        }
        self._tokenizer, self._top_logprobs, self._prompt_logprobs = tokenizer, top_logprobs, prompt_logprobs
        self._returns_token_ids, self._names_by_id, self.num_values = returns_token_ids, names_tokens_by_id, 0
        self._shows_times, self._outputs = shows_times, []

    def count(self, delta: Delta, is_streamed: bool) -> None:
        """Count a delta, and add its log-probabilities to `num_values`; a stream counts only the echoed prompt.

        Raises ApiError above `MAX_LOGPROBS_OF_RESPONSE`.
        """
        if self._shows_times and delta.output is not None:
            self._outputs.append(delta.output)
        prompt, entries = (delta, ()) if is_streamed else (delta.output, delta.logprobs or ())
        if prompt is not None:
            num_copies = len(prompt.completions) if self.repeats_prompt and not is_streamed else 1
            self.num_values += num_copies * len(prompt.prompt_logprobs or ()) * self._num_per_prompt_token
        self.num_values += len(entries) * (1 + (self._top_logprobs or 0))
        field = self.logprobs_field if self._prompt_logprobs is None else "prompt_logprobs"
        remedy = "n, or the number of prompts or tokens"
        if not is_streamed and self._prompt_logprobs is None:
            remedy += ", or have the response streamed"
        check_num_values(self.num_values, field, remedy)

    @property
    def _num_per_prompt_token(self) -> int:
        return 0 if self._prompt_logprobs is None else 1 + self._prompt_logprobs

    @property
    def id(self) -> str:
        return self._head["id"]

    def last_chunks(self, usage: Usage, includes_usage: bool) -> list[dict]:
        """Return the chunks that end a stream."""
        chunk = self._head | {"object": self.chunk_kind, "choices": [], "usage": usage.model_dump()}
        return [chunk | self._times()] if includes_usage else []

    def error_chunk(self, error: ApiError) -> dict:
        """Return the chunk that ends a stream with an error."""
        return error.content()

    def _chunk(self, choice: dict) -> dict:
        return self._head | {"object": self.chunk_kind, "choices": [choice]}

    def _times(self) -> dict[str, dict[str, float | None]]:
        """Return the field `metrics` if it is enabled and there is one choice."""
        if not self._shows_times or len(self._outputs) != 1 or len(self._outputs[0].completions) != 1:
            return {}
        found = self._outputs[0].metrics
        times = {
            "queue_time_ms": found.time_in_queue,
            "time_to_first_token_ms": found.time_to_first_token,
            "generation_time_ms": found.decode_time,
            "mean_itl_ms": found.time_per_output_token,
        }
        shown = {name: None if seconds is None else seconds * 1000 for name, seconds in times.items()}
        rate = 1 / found.time_per_output_token if found.time_per_output_token else None
        return {"metrics": shown | {"tokens_per_second": rate}}

    def _token_ids(self, token_ids: list[int]) -> dict[str, list[int]]:
        return {"token_ids": token_ids} if self._returns_token_ids else {}

    def _prompt_token_ids(self, token_ids: list[int] | None) -> dict[str, list[int]]:
        return {"prompt_token_ids": token_ids} if self._returns_token_ids else {}

    def _of_prompt(self, output: RequestOutput) -> dict[str, list]:
        """Return the requested fields about the prompt: its token ids, and its log-probabilities in vLLM's form."""
        fields = self._prompt_token_ids(output.prompt_token_ids)
        if self._prompt_logprobs is not None:
            found = output.prompt_logprobs
            fields["prompt_logprobs"] = [None if entry is None else self._shown(entry) for entry in found]
        return fields

    def _shown(self, found: LogprobsById) -> dict[str, PromptLogprob]:
        """Return the entries of a prompt token and of the requested number of most likely tokens.

        They are validated one by one; validating a whole response would keep the event loop waiting for a second.
        """
        items = islice(enumerate(found.items()), self._prompt_logprobs + 1)
        return {
            str(token_id): PromptLogprob(
                logprob=max(logprob, NO_LOGPROB), rank=logprob.rank, decoded_token=logprob.decoded_token
            )
            for index, (token_id, logprob) in items
            if not index or logprob.rank <= self._prompt_logprobs
        }


def check_num_values(number: int, field: str, others: str) -> None:
    """Raise ApiError for too many log-probabilities; the message says to lower `field`, or one of `others`."""
    if number > MAX_LOGPROBS_OF_RESPONSE:
        message = f"a response may have at most {MAX_LOGPROBS_OF_RESPONSE} log-probabilities"
        raise ApiError(400, f"{message}; lower {field}, {others}", param=field)


def top_of(logprobs: LogprobsById, number: int | None) -> list[tuple[int, float]]:
    """Return the `number` most likely tokens, which may lack the sampled one."""
    return sorted(logprobs.items(), key=lambda item: -item[1])[:number]


def shown_logprobs(
    entries: Sequence[LogprobsById], number: int, tokenizer: Any, names_by_id: bool = False
) -> list[dict]:
    """Return the log-probabilities of tokens, and of the `number` most likely ones, in the form of chats."""

    def entry(token_id: int, logprob: float) -> dict:
        data = token_bytes(tokenizer, token_id)
        return {
            "token": token_name(token_id, data, names_by_id),
            "logprob": max(logprob, NO_LOGPROB),
            "bytes": list(data),
        }

    return [
        entry(*next(iter(one.items()))) | {"top_logprobs": [entry(*item) for item in top_of(one, number)]}
        for one in entries
    ]


def call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def token_name(token_id: int, data: bytes, by_id: bool) -> str:
    """Return the name of a token in log-probabilities: its text, or its id as in vLLM.

    Incomplete UTF-8 is escaped as in OpenAI's API, "bytes:\\xf0\\x9f".
    """
    if by_id:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
