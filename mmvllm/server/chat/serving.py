"""Serves /v1/chat/completions."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mmvllm.sampling_params import SamplingParams
from mmvllm.server.chat.builder import ChatResponseBuilder
from mmvllm.server.chat.protocol import ChatCompletion, ChatRequest
from mmvllm.server.common.conversation import content_of
from mmvllm.server.common.descriptions import described_chat
from mmvllm.server.common.jobs import CompletionJob
from mmvllm.server.common.messages import InputMessage, TextPart
from mmvllm.server.common.protocol import NO_LIMIT
from mmvllm.server.common.response_models import STREAMS
from mmvllm.server.common.sampling import OPENAI_DEFAULTS, sampling_params
from mmvllm.server.common.serving import Serving
from mmvllm.server.common.structured import structured_field
from mmvllm.server.common.tools import (
    FunctionReference,
    NamedToolChoice,
    ToolDefinition,
    ToolUse,
    demands_call,
    use_of,
)
from mmvllm.server.errors import ApiError, renamed_errors
from mmvllm.server.http.auth_and_limits import ByteReservation

# The older fields that errors name, in place of the fields for tools, if the request has functions.
FUNCTIONS_IN_CHATS = MappingProxyType(
    {"tool_choice.function": "function_call", "tool_choice": "function_call", "].function": "]", "tools": "functions"}
)


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=serving.route_class, tags=["completions"])

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Create a completion for a conversation, whose images and videos are parts `image_url` and `video_url`."""
        return await serving.respond(partial(chat_job, serving), body, request.state.reservation)

    return routes


def chat_job(serving: Serving, body: ChatRequest, reservation: ByteReservation) -> CompletionJob:
    """Return the job for a chat; `reservation` counts the images and videos that it fetches."""
    model, keys = serving.model_of(body.model, body.priority)
    calls_functions = bool(body.functions) or body.function_call is not None
    names = FUNCTIONS_IN_CHATS if calls_functions else {}
    with renamed_errors(names):
        body = _with_functions_as_tools(body) if calls_functions else body
        use = tool_use(serving, body)
    prompt = serving.prompts.of_conversation(body, use.tools, reservation, keys=keys)
    builder = ChatResponseBuilder(
        model,
        serving.engine.tokenizer,
        use.params.num_logprobs,
        body.prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        shows_times=serving.settings.enable_per_request_metrics,
        use=use,
        calls_functions=calls_functions,
        boxes=body.mmvllm.boxes if body.mmvllm else None,
        echoed=_echoed_text(body.messages[-1], body.continue_final_message) if body.echo else "",
    )
    field = use.field.renamed(names) if use.field else structured_field(body)
    serving.check_candidates(use.params, 1, builder)
    described = partial(described_chat, body.messages)
    return CompletionJob([prompt.request], use.params, builder, described, prompt, field, **serving.streaming(body))


def tool_use(serving: Serving, body: ChatRequest) -> ToolUse:
    """Return the sampling parameters of a chat, and the calls that its completion may have."""
    if body.tools and demands_call(body.tool_choice):  # response_format does not apply to calls
        body = body.model_copy(update={"response_format": None})
    params = chat_params(body, serving.engine.max_model_len, serving.sampling_defaults)
    return use_of(body.tools, body.tool_choice, body.parallel_tool_calls, params, serving.engine.tokenizer)


def chat_params(body: ChatRequest, max_model_len: int, defaults: Mapping[str, Any] = OPENAI_DEFAULTS) -> SamplingParams:
    """Return the sampling parameters of a chat, with `defaults` for fields that are omitted or null.

    A completion without a limit may fill the context.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.logprob_token_ids and not body.logprobs:
        raise ApiError(400, "logprob_token_ids needs logprobs: true", param="logprob_token_ids")
    limits = {body.max_completion_tokens, body.max_tokens} - {None, NO_LIMIT}
    if len(limits) == 2:
        message = "max_completion_tokens and max_tokens are two names of the same limit; give one of them"
        raise ApiError(400, message, param="max_tokens")
    max_tokens = limits.pop() if limits else max_model_len
    return sampling_params(body, defaults, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)


def _with_functions_as_tools(body: ChatRequest) -> ChatRequest:
    """Convert a chat with the older `functions` and `function_call` to a chat with tools and at most one call."""
    if body.tools or body.tool_choice is not None:
        field = "function_call" if body.functions is None else "functions"
        raise ApiError(400, f"{field} cannot be used with the newer fields of its kind; choose one form", param=field)
    if not body.functions and isinstance(body.function_call, FunctionReference):
        raise ApiError(400, "function_call needs functions", param="function_call")
    choice = body.function_call
    if isinstance(choice, FunctionReference):
        choice = NamedToolChoice(type="function", function=choice)
    tools = [ToolDefinition(type="function", function=function) for function in body.functions or ()]
    return body.model_copy(update={"tools": tools, "tool_choice": choice, "parallel_tool_calls": False})


def _echoed_text(message: InputMessage, is_continued: bool | None) -> str:
    """Return the text of the final message, with which the content of an echoing answer begins."""
    if not is_continued:
        raise ApiError(400, "echo is true, which needs continue_final_message: true", param="echo")
    content = content_of(message)
    return content if isinstance(content, str) else "".join(part.text for part in content if isinstance(part, TextPart))
