"""Pydantic models of the tools of a chat, and how a request uses its tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mmvllm.errors import RequestError
from mmvllm.processors.chat.tool_calls import END
from mmvllm.processors.chat.tool_grammar import calls_or_json_grammar, free_text_grammar, tool_call_grammar
from mmvllm.processors.chat.tools import MAX_TOOLS, NAME, check_parameters
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.common.messages import Flag, OpenModel, StrictModel, tag_by
from mmvllm.server.common.structured import StructuredField
from mmvllm.server.errors import ApiError
from mmvllm.structured.params import MAX_CHARACTERS, StructuredOutputsParams
from mmvllm.structured.schema_keywords import MAX_SCHEMAS, num_schemas
from mmvllm.utils.text import has_more_values


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        return check_parameters(schema)
    except RequestError as error:
        reason = str(error).removeprefix(f"{error.param} ")
        raise PydanticCustomError("parameters", "{reason}", {"reason": reason}) from None


ANY_PARAMETERS = {"type": "object", "additionalProperties": True}
MAX_VALUES_IN_LOOP = 32_768  # of tools, or of template arguments; checking them blocks the event loop for 30 ms
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}

FunctionName = Annotated[str, Field(pattern=f"^{NAME}$")]
Parameters = Annotated[dict[str, Any], AfterValidator(_check_parameters)]


class FunctionDefinition(OpenModel):
    misplaced = ("input_schema", "schema", "params", "arguments", "args", "properties", "required")

    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = Field(None, description="A JSON schema of an object.")
    strict: Flag = Field(None, description="Calls of this function always fit its parameters.")


class FreeText(StrictModel):
    type: Literal["text"]


class CustomDefinition(OpenModel):
    """A tool whose input is a text; the model sees a function with the parameter `input`."""

    misplaced = (*FunctionDefinition.misplaced, "parameters", "strict")

    name: FunctionName
    description: str | None = None
    format: FreeText | None = None


class ToolDefinition(OpenModel):
    misplaced = ("name", "description", "parameters", "strict", "input_schema")

    type: Literal["function"]
    function: FunctionDefinition


class CustomToolDefinition(OpenModel):
    misplaced = ToolDefinition.misplaced

    type: Literal["custom"]
    custom: CustomDefinition

    @cached_property
    def function(self) -> FunctionDefinition:
        """The function that the model sees."""
        return FunctionDefinition(name=self.custom.name, description=self.custom.description, parameters=_INPUT)


class FunctionReference(StrictModel):
    name: str


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: FunctionReference


class NamedCustomToolChoice(StrictModel):
    type: Literal["custom"]
    custom: FunctionReference


BY_TOOL_TYPE = Discriminator(
    tag_by("type", {"function": "a function", "custom": "a custom tool"}),
    custom_error_type="tool",
    custom_error_message="must have the type 'function' or 'custom'; this server has no built-in tools",
)
NamedChoice = NamedToolChoice | NamedCustomToolChoice
NamedTool = Annotated[
    Annotated[NamedToolChoice, Tag("a function")] | Annotated[NamedCustomToolChoice, Tag("a custom tool")],
    BY_TOOL_TYPE,
]


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def by_form(tags: Mapping[str, str]) -> Discriminator:
    """Return the discriminator of `tool_choice`; `tags` maps the types of choices other than functions to tags."""
    tag = tag_by("type", tags, "a function")
    return Discriminator(lambda choice: tag(choice) if isinstance(choice, dict | BaseModel) else "a word")


def check_size(tools: Any) -> Any:
    """Refuse values that would keep the event loop busy; the prompt would have to show them, and would not fit."""
    if has_more_values(tools, MAX_VALUES_IN_LOOP):
        raise PydanticCustomError("too_many_values", f"has more than {MAX_VALUES_IN_LOOP} values")
    return tools


Tool = Annotated[
    Annotated[ToolDefinition, Tag("a function")] | Annotated[CustomToolDefinition, Tag("a custom tool")], BY_TOOL_TYPE
]
Functions = Annotated[
    list[FunctionDefinition], Field(fail_fast=True, max_length=MAX_TOOLS), BeforeValidator(check_size)
]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS), BeforeValidator(check_size)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[NamedToolChoice, Tag("a function")]
    | Annotated[NamedCustomToolChoice, Tag("a custom tool")]
    | Annotated[AllowedToolsChoice, Tag("allowed tools")],
    by_form({"allowed_tools": "allowed tools", "custom": "a custom tool"}),
]

FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("a word")] | Annotated[FunctionReference, Tag("a function")],
    Discriminator(lambda choice: "a function" if isinstance(choice, dict | BaseModel) else "a word"),
]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request uses its tools.

    Args:
        tools: the tools that the prompt describes.
        names: names of the functions whose calls are parsed from a completion.
        custom: names of the request's custom tools.
        params: the request's sampling parameters, with the constraints that its tools impose on the completion.
        field: the request field with these constraints, if there are any.
    """

    params: SamplingParams
    tools: Sequence[dict] = ()
    names: frozenset[str] = frozenset()
    custom: frozenset[str] = frozenset()
    field: StructuredField | None = None


def demands_call(choice: ToolChoice | None) -> bool:
    """Return whether the completion must be a call."""
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolsChoice) else choice
    return mode not in (None, "none", "auto")


def use_of(
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel_tool_calls: bool | None,
    params: SamplingParams,
    tokenizer: Any,
) -> ToolUse:
    """Return the `ToolUse`; raises ApiError for an invalid choice, and for schemas that cannot be enforced."""
    given = prompt_tools(tools)
    names = [tool["function"]["name"] for tool in given]
    _check_choice(choice, names)
    if not given or choice == "none":
        return ToolUse(params)
    is_parallel = parallel_tool_calls is not False and not isinstance(choice, NamedChoice)
    names = _allowed_names(choice) or names
    custom = frozenset(tool.function.name for tool in tools if isinstance(tool, CustomToolDefinition))
    enforced = [tool.function.name in names and (demands_call(choice) or bool(tool.function.strict)) for tool in tools]
    _check_schemas(given, enforced)
    if isinstance(choice, AllowedToolsChoice):  # the model sees no other tools
        is_allowed = [tool["function"]["name"] in names for tool in given]
        given, enforced = [*compress(given, is_allowed)], [*compress(enforced, is_allowed)]
    grammar = None
    if not demands_call(choice):
        grammar = _free_grammar(given, enforced, params.structured, is_parallel, tokenizer)
    elif params.structured is not None:
        message = "tool_choice says what the completion must be, and so does another field; give one of them"
        raise ApiError(400, message, param="tool_choice")
    else:
        chosen = [tool for tool in given if tool["function"]["name"] in names]
        grammar = tool_call_grammar(chosen, tokenizer, is_parallel)
    _check_beam_search(params, is_restricted=grammar is not None or not is_parallel)
    if not is_parallel and not demands_call(choice) and params.structured is None:
        params = replace(params, stop=(*params.stop, END))  # the end of the first call ends the completion
    if grammar is None:
        return ToolUse(params, given, frozenset(names), custom)
    field = StructuredField({"grammar": grammar}, {"grammar": "tools"})
    return ToolUse(_structured(params, field), given, frozenset(names), custom, field)


def _structured(params: SamplingParams, field: StructuredField) -> SamplingParams:
    try:
        return replace(params, structured=field.params())
    except RequestError as error:  # another parameter contradicts it
        message, param = field.format_error(error) or (str(error).replace("structured", "tools", 1), error.param)
        raise ApiError(400, message, param=param) from None


def prompt_tools(tools: Sequence[Tool] | None) -> list[dict]:
    """Return the tools as a prompt describes them; raises ApiError if two have the same name."""
    functions = [tool.function.model_dump(exclude_none=True, exclude={"strict"}) for tool in tools or ()]
    given = [{"type": "function", "function": function} for function in functions]
    _check_names(tools or ())
    return given


def _check_names(tools: Sequence[Tool]) -> None:
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if (name := tool.function.name) in names:
            path = f"tools[{i}].{tool.type}.name"
            raise ApiError(400, f"{path} is {name!r}, the name of another tool", param=path)
        names.add(name)


def _allowed_names(choice: ToolChoice | None) -> dict[str, str]:
    """Map the functions to which a choice is limited to their request paths; empty if it is not limited."""
    if isinstance(choice, NamedChoice):
        return {_name_of(choice): f"tool_choice.{choice.type}.name"}
    allowed = choice.allowed_tools.tools if isinstance(choice, AllowedToolsChoice) else ()
    return {_name_of(one): f"tool_choice.allowed_tools.tools[{i}].{one.type}.name" for i, one in enumerate(allowed)}


def _name_of(choice: NamedChoice) -> str:
    return getattr(choice, choice.type).name


def _check_choice(choice: ToolChoice | None, names: Sequence[str]) -> None:
    if not names and choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    for name, path in _allowed_names(choice).items():
        if name not in names:
            raise ApiError(400, f"{path} is {name!r:.100}, which is not the name of a tool", param=path)


def _check_beam_search(params: SamplingParams, is_restricted: bool) -> None:
    if is_restricted and params.beam_width is not None:
        message = f"tools whose calls are enforced cannot be used with beam search (beam_width={params.beam_width}); "
        message += "leave out strict, parallel_tool_calls and a tool_choice other than auto"
        raise ApiError(400, message, param="tools")


def _check_schemas(tools: Sequence[dict], enforced: Sequence[bool]) -> None:
    schemas = [tool["function"].get("parameters") for tool in compress(tools, enforced)]
    size = sum(len(json.dumps(schema, ensure_ascii=False)) for schema in schemas)
    if size > MAX_CHARACTERS:  # before each of them is checked
        raise ApiError(400, f"tools must have at most {MAX_CHARACTERS} characters, got {size}", param="tools")
    if sum(map(num_schemas, schemas)) > MAX_SCHEMAS:
        raise ApiError(400, f"the parameters of tools have more than {MAX_SCHEMAS} schemas within them", param="tools")
    for i, tool in enumerate(tools):
        schema = tool["function"].get("parameters") if enforced[i] else None
        field = StructuredField({"json": schema} if schema else {}, {"json": f"tools[{i}].function.parameters"})
        try:
            field.params()
        except RequestError as error:
            message, param = field.format_error(error)
            raise ApiError(400, message, param=param) from None


def _free_grammar(
    tools: Sequence[dict],
    enforced: Sequence[bool],
    structured: StructuredOutputsParams | None,
    is_parallel: bool,
    tokenizer: Any,
) -> str | None:
    """Return the grammar of a completion that may have calls, or None if it is unconstrained."""
    if structured is None and not any(enforced):
        return None
    functions = [
        tool if is_strict else {"function": {"name": tool["function"]["name"], "parameters": ANY_PARAMETERS}}
        for tool, is_strict in zip(tools, enforced, strict=True)
    ]
    if structured is None:
        return free_text_grammar(functions, tokenizer)
    if not structured.is_json:
        message = "tools and a regular expression, a choice or a grammar exclude each other, unless tool_choice is none"
        raise ApiError(400, message, param="tools")
    schema = json.loads(structured.json or '{"type": "object"}')
    return calls_or_json_grammar(functions, tokenizer, schema, is_parallel)
