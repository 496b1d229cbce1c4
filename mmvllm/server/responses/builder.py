"""Builds the responses of OpenAI's Responses API, whole or as events, from the engine's deltas."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from mmvllm.outputs import Delta, LogprobsById
from mmvllm.processors.chat.tool_calls import CallPiece, FunctionCall
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.common.call_reader import CallReader, CustomCall
from mmvllm.server.common.response_builder import (
    FINISH_REASONS,
    ChoiceBuffer,
    call_id,
    check_num_values,
    shown_logprobs,
)
from mmvllm.server.common.response_models import Usage
from mmvllm.server.common.tools import ToolUse
from mmvllm.server.errors import ApiError
from mmvllm.server.responses.protocol import ResponseObject, ResponsesRequest

REPEATED = {"instructions", "tools", "text", "tool_choice", "metadata"}  # request fields that the response repeats


class ResponseObjectBuilder:
    """Builds the response to one request, whole or as a stream of events, each with its `type`."""

    prompt_field, logprobs_field = "input", "top_logprobs"
    end = None  # the last event ends the stream

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        body: ResponsesRequest,
        params: SamplingParams,
        use: ToolUse,
        store: Callable[[dict], None] | None,
    ):
        """Prepare a response; `use` has the tools whose calls are parsed from the completion.

        `store` is called with the complete response.
        """
        self.model = model
        self._head = _head(model, body, params, is_stored=store is not None)
        self._tokenizer, self._store = tokenizer, store
        self._num_logprobs, self.num_values = params.num_logprobs, 0
        self._logprobs: list[dict] = []  # of tokens whose text has not arrived
        self._reader = CallReader(use)
        self._items: list[dict] = []
        self._is_open = False  # whether more may come for the last item
        self._finish_reason: str | None = None
        self._num_events = 0

    @property
    def id(self) -> str:
        return self._head["id"]

    def count(self, delta: Delta, is_streamed: bool) -> None:
        """Add the log-probabilities of a delta to `num_values`; raises ApiError for too many."""
        num_copies = 4 if is_streamed else 1  # each of the last four events has all of them
        self.num_values += num_copies * len(delta.logprobs or ()) * (1 + (self._num_logprobs or 0))
        check_num_values(self.num_values, "top_logprobs", "or max_output_tokens")

    def whole(self, choices: Sequence[ChoiceBuffer], usage: Usage) -> ResponseObject:
        """Return the response to a request that is not streamed."""
        [choice] = choices
        text, self._finish_reason = "".join(choice.text), choice.finish_reason
        content, calls = self._reader.read(text)
        if content or not calls:
            self._items.append(_message(content, self._shown(choice.logprobs)))
        self._items += map(_call, calls)
        self._items[-1]["status"] = self._status
        return ResponseObject(**self._response(usage))

    def first_chunks(self, _num_choices: int, _delta: Delta) -> list[dict]:
        """Return the events that start a stream."""
        response = self._head | {"status": "in_progress", "output": []}
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def chunks(self, _index: int, delta: Delta) -> list[dict]:
        """Return the events for new tokens; none while their text may belong to the mark of a call."""
        self._finish_reason = FINISH_REASONS[delta.finish_reason]
        is_last = delta.finish_reason is not None
        self._logprobs += self._shown(delta.logprobs or ())
        return [event for piece in self._reader.feed(delta.text, is_last) for event in self._add(piece)]

    def last_chunks(self, usage: Usage, _includes_usage: bool) -> list[dict]:
        """Return the events that end a stream."""
        events = [] if self._items else self._open(_message(""))
        events += self._close(self._status)
        return [*events, self._event(f"response.{self._status}", response=self._response(usage))]

    def _shown(self, entries: Sequence[LogprobsById]) -> list[dict]:
        if self._num_logprobs is None:
            return []
        return shown_logprobs(entries, self._num_logprobs, self._tokenizer)

    def error_chunk(self, error: ApiError) -> dict:
        """Return the event that ends a stream with an error."""
        about = error.content()["error"]
        return self._event("error", code=about["code"] or about["type"], message=about["message"], param=about["param"])

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _response(self, usage: Usage) -> dict:
        details = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": usage.prompt_tokens_details.model_dump(),
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }
        made = {"status": self._status, "incomplete_details": details, "output": self._items, "usage": counts}
        response = self._head | made
        if self._store is not None:
            self._store(response)
        return response

    def _add(self, piece: str | CallPiece | CustomCall) -> list[dict]:
        """Return the events for a piece of content or of a call."""
        if isinstance(piece, CustomCall):
            events = self._close("completed") + self._open(_call(replace(piece, input="")))
            self._items[-1]["input"] = piece.input
            return [*events, self._about("custom_tool_call_input.delta", delta=piece.input)]
        events = []
        if isinstance(piece, str):
            if not self._is_open or self._items[-1]["type"] != "message":
                events = self._close("completed") + self._open(_message(""))
            return [*events, self._add_text(piece)]
        if piece.name is not None:
            events = self._close("completed") + self._open(_call(FunctionCall(piece.name, "")))
        self._items[-1]["arguments"] += piece.arguments
        if piece.arguments:
            events.append(self._about("function_call_arguments.delta", delta=piece.arguments))
        return events

    def _add_text(self, piece: str) -> dict:
        """Return the event for a piece of text, with the log-probabilities of all tokens since the last event."""
        part, logprobs = self._items[-1]["content"][0], self._logprobs
        part["text"] += piece
        part["logprobs"] += logprobs
        self._logprobs = []
        return self._about_text("output_text.delta", delta=piece, logprobs=logprobs)

    def _open(self, item: dict) -> list[dict]:
        item["status"] = "in_progress"
        self._items.append(item)
        self._is_open = True
        begun = item | ({"content": []} if item["type"] == "message" else {})
        events = [self._event("response.output_item.added", output_index=len(self._items) - 1, item=begun)]
        if item["type"] == "message":
            events.append(self._about_text("content_part.added", part=item["content"][0] | {"logprobs": []}))
        return events

    def _close(self, status: str) -> list[dict]:
        """Return the events that end the last item, if it has not ended."""
        if not self._is_open:
            return []
        item, self._is_open = self._items[-1], False
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            events = [
                *([self._add_text("")] if self._logprobs else ()),  # of tokens without a text
                self._about_text("output_text.done", text=part["text"], logprobs=part["logprobs"]),
                self._about_text("content_part.done", part=part),
            ]
        elif item["type"] == "custom_tool_call":
            events = [self._about("custom_tool_call_input.done", input=item["input"])]
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._about("function_call_arguments.done", **call)]
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _about_text(self, kind: str, **fields: Any) -> dict:
        return self._about(kind, content_index=0, **fields)

    def _about(self, kind: str, **fields: Any) -> dict:
        """Return an event about the last item."""
        item_id, index = self._items[-1]["id"], len(self._items) - 1
        return self._event(f"response.{kind}", item_id=item_id, output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> dict:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _head(model: str, body: ResponsesRequest, params: SamplingParams, is_stored: bool) -> dict:
    """Return the fields of a response that are known before its output."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": is_stored,
        "temperature": params.temperature,
        "text": {"format": _dumped(body.text.format) if body.text and body.text.format else {"type": "text"}},
        "tool_choice": _dumped(body.tool_choice) or "auto",
        "tools": [_dumped(tool) for tool in body.tools or ()],
        "top_logprobs": body.num_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


def _dumped(value: Any) -> Any:
    return value.model_dump(by_alias=True) if isinstance(value, BaseModel) else value


def _message(text: str, logprobs: Sequence[dict] = ()) -> dict:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}
    name = f"msg_{uuid.uuid4().hex}"
    return {"type": "message", "id": name, "status": "completed", "role": "assistant", "content": [part]}


def _call(call: FunctionCall | CustomCall) -> dict:
    common = {"call_id": call_id(), "status": "completed", "name": call.name}
    if isinstance(call, CustomCall):
        return {"type": "custom_tool_call", "id": f"ctc_{uuid.uuid4().hex}", **common, "input": call.input}
    return {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", **common, "arguments": call.arguments}
