"""The older form of tools in chats: `functions` and `function_call`."""

from types import MappingProxyType

from mmvllm.server.errors import ApiError
from mmvllm.server.protocol import ChatRequest
from mmvllm.server.tools import FunctionReference, NamedToolChoice, ToolDefinition

# How errors about tools name the fields of a request that has functions.
FUNCTIONS_IN_CHATS = MappingProxyType(
    {"tool_choice.function": "function_call", "tool_choice": "function_call", "].function": "]", "tools": "functions"}
)


def has_functions(body: ChatRequest) -> bool:
    """Whether a chat has the older form of tools."""
    return bool(body.functions) or body.function_call is not None


def with_functions_as_tools(body: ChatRequest) -> ChatRequest:
    """The chat with its functions as tools, of which at most one is called; raises ApiError beside other tools."""
    if not has_functions(body):
        return body
    if body.tools or body.tool_choice is not None:
        field = "function_call" if body.functions is None else "functions"
        raise ApiError(400, f"{field} excludes the newer fields of its kind; leave one form out", param=field)
    if not body.functions and isinstance(body.function_call, FunctionReference):
        raise ApiError(400, "function_call needs functions", param="function_call")
    choice = body.function_call
    if isinstance(choice, FunctionReference):
        choice = NamedToolChoice(type="function", function=choice)
    tools = [ToolDefinition(type="function", function=function) for function in body.functions or ()]
    return body.model_copy(update={"tools": tools, "tool_choice": choice, "parallel_tool_calls": False})
