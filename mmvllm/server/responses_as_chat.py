"""The chat that a request of OpenAI's Responses API stands for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pydantic import ValidationError

from mmvllm.server.errors import ApiError, explain
from mmvllm.server.messages import ImageSizes
from mmvllm.server.protocol import ChatRequest, SamplingRequest
from mmvllm.server.responses_request import (
    FunctionCallItem,
    FunctionChoice,
    FunctionOutputItem,
    InputImage,
    InputItem,
    InputText,
    Item,
    JsonSchemaFormat,
    ResponsesRequest,
)
from mmvllm.server.structured import StructuredField

NOT_SHARED = frozenset(("n", "stream_options", "return_token_ids", "prompt_logprobs", "response_format"))
NAMES_IN_CHATS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "].function": "]",
    "tool_choice.function": "tool_choice",
    "messages": "input",
    "max_tokens": "max_output_tokens",
}


@contextmanager
def named_as_input() -> Iterator[None]:
    """Name the fields of an ApiError about the chat as a request has them."""
    try:
        yield
    except ApiError as error:
        error.param, error.detail = _renamed(error.param), _renamed(error.detail)
        raise


def in_text_options(field: StructuredField) -> StructuredField:
    """What a chat's `response_format` asks for, with the paths of `text.format`."""
    return StructuredField(field.values, {name: _renamed(path) for name, path in field.paths.items()})


def _renamed(text: str | None) -> str | None:
    for name, own in NAMES_IN_CHATS.items():
        text = text and text.replace(name, own)
    return text


def as_chat(body: ResponsesRequest, given: Sequence[Item], earlier: Sequence[Item]) -> tuple[ChatRequest, list[str]]:
    """The chat that a request stands for, and the path of each of its images in the request.

    `given` are the items of its input, `earlier` those of a stored conversation that goes on with them.
    """
    image_params: list[str] = []
    messages = _messages(earlier, image_params)
    image_params = ["previous_response_id"] * len(image_params)
    messages = _with_instructions(_messages(given, image_params, messages), body.instructions)
    shared = set(SamplingRequest.model_fields) - NOT_SHARED
    fields = {name: getattr(body, name) for name in shared & body.model_fields_set}
    fields |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    fields |= {"chat_template_kwargs": body.chat_template_kwargs, "parallel_tool_calls": body.parallel_tool_calls}
    fields["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    fields["tools"] = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    fields |= {"tool_choice": choice, "response_format": _response_format(body)}
    fields |= {"logprobs": body.num_logprobs is not None, "top_logprobs": body.num_logprobs}
    try:
        return ChatRequest.model_validate(fields), image_params
    except ValidationError as error:  # for limits of a chat as a whole
        param, message = explain([{**one, "loc": ("body", *one["loc"])} for one in error.errors()], fields)
        raise ApiError(400, f"{param}: {message}", param=param) from None


def _response_format(body: ResponsesRequest) -> dict | None:
    """As chats have it: with a schema in an object of its own."""
    given = body.text.format if body.text else None
    if not isinstance(given, JsonSchemaFormat):
        return None if given is None else given.model_dump()
    return {"type": "json_schema", "json_schema": given.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}


def _messages(items: Sequence[Item], image_params: list[str], before: Sequence[dict] = ()) -> list[dict]:
    """The messages of items that follow others; adds the path of each image to `image_params`."""
    made = [*before]
    for i, item in enumerate(items):
        if isinstance(item, FunctionCallItem):
            _add_call(made, item)
        elif isinstance(item, FunctionOutputItem):
            content = _content(item.output, f"input[{i}].output", image_params)
            made.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
        elif isinstance(item, InputItem):
            made.append({"role": item.role, "content": _content(item.content, f"input[{i}].content", image_params)})
    return made


def _add_call(messages: list[dict], item: FunctionCallItem) -> None:
    """Calls belong to the message of the assistant before them."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item.name, "arguments": item.arguments}
    messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _content(
    content: str | Sequence[InputText | InputImage] | None, path: str, image_params: list[str]
) -> str | list[dict]:
    if content is None or isinstance(content, str):
        return content or ""
    made = []
    for j, part in enumerate(content):
        if isinstance(part, InputText):
            made.append({"type": "text", "text": part.text})
            continue
        image_params.append(f"{path}[{j}].image_url")
        sizes = {name: getattr(part, name) for name in ImageSizes.model_fields}
        made.append({"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}, **sizes})
    return made


def _with_instructions(messages: list[dict], instructions: str | None) -> list[dict]:
    """Instructions precede a system message in one message with it: some templates read the first one only."""
    if not instructions:
        return messages
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": instructions}, *messages]
    own = messages[0]["content"]
    parts = [{"type": "text", "text": own}] if isinstance(own, str) else own
    return [{"role": "system", "content": [{"type": "text", "text": f"{instructions}\n\n"}, *parts]}, *messages[1:]]
