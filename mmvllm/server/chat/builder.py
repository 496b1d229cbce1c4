"""Builds the responses of /v1/chat/completions, whole or in chunks, from the engine's deltas."""

from collections.abc import Sequence
from typing import Any, Literal

from mmvllm.grounding import Box, Point
from mmvllm.outputs import Delta, LogprobsById
from mmvllm.processors.chat.tool_calls import END, CallPiece, FunctionCall
from mmvllm.server.chat.protocol import ChatCompletion, ChatLogprobs, TokenLogprob
from mmvllm.server.common.call_reader import CallReader, CustomCall
from mmvllm.server.common.response_builder import FINISH_REASONS, ChoiceBuffer, ResponseBuilder, call_id, shown_logprobs
from mmvllm.server.common.response_models import Usage
from mmvllm.server.common.tools import ToolUse


class ChatResponseBuilder(ResponseBuilder):
    """Builds the response to one request of /v1/chat/completions."""

    kind, chunk_kind, id_prefix, prompt_field = "chat.completion", "chat.completion.chunk", "chatcmpl", "messages"
    logprobs_field, repeats_prompt = "top_logprobs", False

    def __init__(
        self,
        *args: Any,
        use: ToolUse,
        calls_functions: bool = False,
        boxes: bool | Literal["stored"] | None = None,
        echoed: str = "",
        **shown: Any,
    ):
        """Show calls, boxes and an echoed text, in addition to what the base class shows.

        Args:
            use: the tools whose calls are parsed from completions.
            calls_functions: show only the first call, in the older form `function_call`.
            boxes: add the boxes that the model wrote to each choice; "stored" uses pixels before EXIF rotation.
            echoed: text at the beginning of the content of each choice.
        """
        super().__init__(*args, **shown)
        self._use, self._calls_functions, self._with_boxes, self._echoed = use, calls_functions, boxes, echoed
        self._readers: dict[int, CallReader] = {}  # by choice

    def whole(self, choices: Sequence[ChoiceBuffer], usage: Usage) -> ChatCompletion:
        """Return the response to a request that is not streamed."""
        made = [self._choice(choice) for choice in choices]
        others = self._of_prompt(choices[0].output) | self._times()
        return ChatCompletion(**self._head, choices=made, usage=usage, **others)

    def _choice(self, choice: ChoiceBuffer) -> dict:
        text, message = "".join(choice.text), {"role": "assistant"}
        reader = CallReader(self._use)
        content, calls = reader.read(text)
        if calls and self._calls_functions:
            message["function_call"] = _called(calls[0])["function"]
        elif calls:
            message["tool_calls"] = [{"id": call_id(), **_called(call)} for call in calls]
        content = self._echoed + content
        shown = self._logprobs(choice.logprobs)
        if shown is not None:  # validated one by one, see `_shown`
            shown = ChatLogprobs(content=[TokenLogprob(**entry) for entry in shown["content"]])
        return {
            "index": choice.index,
            "message": message | {"content": content or None if calls else content},
            "logprobs": shown,
            "finish_reason": self._reason(choice.finish_reason, reader),
            "stop_reason": self._stop_reason(choice.stop_reason),
            **self._token_ids(choice.token_ids),
            **self._extras(choice.boxes),
        }

    def first_chunks(self, num_choices: int, delta: Delta) -> list[dict]:
        """Return the chunks that start a stream, before the first delta: the role of each choice."""
        first = {"role": "assistant", "content": self._echoed}
        ids = self._prompt_token_ids(delta.prompt_token_ids)
        return [
            self._chunk({"index": index, "delta": first, "logprobs": None, "finish_reason": None}) | ids
            for index in range(num_choices)
        ]

    def chunks(self, index: int, delta: Delta) -> list[dict]:
        """Return the chunks for new tokens of a choice; none while their text may belong to the mark of a call."""
        reader = self._readers.setdefault(index, CallReader(self._use))
        parts = self._parts(reader, delta)
        others = {"logprobs": self._logprobs(delta.logprobs or []), **self._token_ids(delta.token_ids)}
        reason = self._reason(FINISH_REASONS[delta.finish_reason], reader)
        if not parts and reason is None and not any(others.values()):
            return []
        *first, last = parts or [{}]
        made = [{"index": index, "delta": part, "logprobs": None, "finish_reason": None} for part in first]
        if delta.finish_reason is not None:
            others |= {"stop_reason": self._stop_reason(delta.stop_reason), **self._extras(delta.boxes)}
        return [
            *map(self._chunk, made),
            self._chunk({"index": index, "delta": last, **others, "finish_reason": reason}),
        ]

    def _stop_reason(self, found: str | int | None) -> str | int | None:
        """Return the stop reason, or None for the end of a single call, a stop string that the server adds."""
        return None if self._use.names and found == END else found

    def _parts(self, reader: CallReader, delta: Delta) -> list[dict]:
        """Return the new content and calls of the message."""
        pieces = reader.feed(delta.text, is_last=delta.finish_reason is not None)
        if self._calls_functions:
            pieces = [one for one in pieces if isinstance(one, str) or one.index == 0]
        return [{"content": one} if isinstance(one, str) else self._call_part(one) for one in pieces]

    def _call_part(self, piece: CallPiece | CustomCall) -> dict:
        """Return a piece of a call in the form of OpenAI's chunks; the first piece has the id and the name."""
        called = {"function": {"arguments": piece.arguments}} if piece.name is None else _called(piece)
        if self._calls_functions:
            return {"function_call": called["function"]}
        head = {} if piece.name is None else {"id": call_id()}
        return {"tool_calls": [{"index": piece.index, **head, **called}]}

    def _reason(self, finish_reason: str | None, reader: CallReader) -> str | None:
        if finish_reason != "stop" or not reader.ends_with_calls:  # a stop string may have cut a call off
            return finish_reason
        return "function_call" if self._calls_functions else "tool_calls"

    def _extras(self, boxes: Sequence[Box | Point]) -> dict[str, Any]:
        """Return the extension field `mmvllm` of a finished choice, if the request asks for it."""
        if not self._with_boxes:
            return {}
        shown = (box.in_stored_pixels() for box in boxes) if self._with_boxes == "stored" else boxes
        return {"mmvllm": {"boxes": [box.to_dict() for box in shown]}}

    def _logprobs(self, entries: Sequence[LogprobsById]) -> dict | None:
        if self._top_logprobs is None:
            return None
        return {"content": shown_logprobs(entries, self._top_logprobs, self._tokenizer, self._names_by_id)}


def _called(call: CallPiece | FunctionCall | CustomCall) -> dict:
    """Return a call in the form of OpenAI's chats."""
    if isinstance(call, CustomCall):
        return {"type": "custom", "custom": {"name": call.name, "input": call.input}}
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
