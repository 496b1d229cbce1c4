"""Translates requests of OpenAI's Responses API to chats."""

from collections.abc import Sequence

from pydantic import ValidationError

from mmvllm.processors.chat.tools import MAX_TOOLS, arguments_as_text
from mmvllm.server.chat.protocol import ChatRequest
from mmvllm.server.common.messages import ImageSizes
from mmvllm.server.common.protocol import SamplingRequest
from mmvllm.server.errors import ApiError, explain
from mmvllm.server.responses.protocol import (
    AllowedToolNames,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    InputImage,
    InputItem,
    InputText,
    Item,
    JsonSchemaFormat,
    ResponsesRequest,
    ToolName,
)

NOT_SHARED = frozenset(("n", "stream_options", "return_token_ids", "prompt_logprobs", "response_format"))
NAMES_IN_CHATS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "].function": "]",
    "].custom": "]",
    "tool_choice.function": "tool_choice",
    "tool_choice.custom": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "messages": "input",
    "max_tokens": "max_output_tokens",
}


def as_chat(body: ResponsesRequest, messages: Sequence[dict]) -> ChatRequest:
    """Convert a request to the equivalent chat, given the messages of its conversation."""
    messages = _with_instructions([*messages], body.instructions)
    shared = set(SamplingRequest.model_fields) - NOT_SHARED
    fields = {name: getattr(body, name) for name in shared & body.model_fields_set}
    fields |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    fields |= {"chat_template_kwargs": body.chat_template_kwargs, "parallel_tool_calls": body.parallel_tool_calls}
    fields["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    fields["tools"] = [
        {"type": tool.type, tool.type: tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in body.tools or ()
    ]
    fields |= {"tool_choice": _tool_choice(body.tool_choice), "response_format": _response_format(body)}
    fields |= {"logprobs": body.num_logprobs is not None, "top_logprobs": body.num_logprobs}
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:  # limits that apply to the whole chat
        param, message = explain([{**one, "loc": ("body", *one["loc"])} for one in error.errors()], fields)
        raise ApiError(400, f"{param}: {message}", param=param) from None


def _tool_choice(choice: str | ToolName | AllowedToolNames | None) -> str | dict | None:
    """Convert the tool choice to the nested form of chats."""
    if isinstance(choice, ToolName):
        return {"type": choice.type, choice.type: {"name": choice.name}}
    if isinstance(choice, AllowedToolNames):
        return {"type": choice.type, choice.type: {"mode": choice.mode, "tools": [*map(_tool_choice, choice.tools)]}}
    return choice


def _response_format(body: ResponsesRequest) -> dict | None:
    """Convert the format to the form of chats, with the schema in a nested object."""
    given = body.text.format if body.text else None
    if not isinstance(given, JsonSchemaFormat):
        return None if given is None else given.model_dump()
    return {"type": "json_schema", "json_schema": given.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}


def messages_of(items: Sequence[Item], earlier: Sequence[dict] = ()) -> list[dict]:
    """Convert items to chat messages, and append them to a copy of the `earlier` ones."""
    made = [*earlier]
    for item in items:
        if isinstance(item, FunctionCallItem | CustomCallItem):
            _add_call(made, item)
        elif isinstance(item, CallOutputItem):
            made.append({"role": "tool", "content": _content(item.output), "tool_call_id": item.call_id})
        elif isinstance(item, InputItem):
            made.append({"role": item.role, "content": _content(item.content or item.refusal)})
    return made


def image_params_of(items: Sequence[Item], earlier: Sequence[dict] = ()) -> list[str]:
    """Return the request path of each image in the result of `messages_of` with the same arguments."""
    contents = [message["content"] for message in earlier if isinstance(message["content"], list)]
    stored = ["previous_response_id" for content in contents for part in content if part["type"] == "image_url"]
    return stored + [
        f"input[{i}].{field}[{j}].image_url"
        for i, item in enumerate(items)
        for field in ("content", "output")
        if isinstance(parts := getattr(item, field, None), Sequence) and not isinstance(parts, str)
        for j, part in enumerate(parts)
        if isinstance(part, InputImage)
    ]


def _add_call(messages: list[dict], item: FunctionCallItem | CustomCallItem) -> None:
    """Add a call to the assistant message before it, or else to a new one."""
    is_after = messages and messages[-1]["role"] == "assistant"
    message = messages.pop() if is_after else {"role": "assistant", "content": None}
    if isinstance(item, CustomCallItem):
        call = {"type": "custom", "custom": {"name": item.name, "input": item.input}}
    else:
        call = {"type": "function", "function": {"name": item.name, "arguments": arguments_as_text(item.arguments)}}
    calls = [*message.get("tool_calls", ()), {"id": item.call_id, **call}]
    if len(calls) > MAX_TOOLS:
        raise ApiError(400, f"input: more than {MAX_TOOLS} calls follow each other", param="input")
    messages.append({**message, "tool_calls": calls})


def _content(content: str | Sequence[InputText | InputImage] | None) -> str | list[dict]:
    return content or "" if content is None or isinstance(content, str) else [*map(_part, content)]


def _part(part: InputText | InputImage) -> dict:
    if isinstance(part, InputText):
        return {"type": "text", "text": part.text}
    sizes = {name: value for name in ImageSizes.model_fields if (value := getattr(part, name)) is not None}
    return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}, **sizes}


def _with_instructions(messages: list[dict], instructions: str | None) -> list[dict]:
    """Merge instructions and a first system message into one: some templates read only the first message."""
    if not instructions:
        return messages
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": instructions}, *messages]
    own = messages[0]["content"]
    parts = [{"type": "text", "text": own}] if isinstance(own, str) else own
    return [{"role": "system", "content": [{"type": "text", "text": f"{instructions}\n\n"}, *parts]}, *messages[1:]]
