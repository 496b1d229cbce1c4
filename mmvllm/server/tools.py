"""Pydantic models of the tools of a chat, and how a request uses its tools."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mmvllm.errors import RequestError
from mmvllm.processors.tool_calls import END
from mmvllm.processors.tool_grammar import free_text_grammar, tool_call_grammar
from mmvllm.processors.tools import MAX_TOOLS, NAME, check_names, check_parameters
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.errors import ApiError
from mmvllm.server.messages import StrictModel


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        return check_parameters(schema)
    except RequestError as error:
        reason = str(error).removeprefix(f"{error.param} ")
        raise PydanticCustomError("parameters", "{reason}", {"reason": reason}) from None


FunctionName = Annotated[str, Field(pattern=f"^{NAME}$")]
Parameters = Annotated[dict[str, Any], AfterValidator(_check_parameters)]


class FunctionDefinition(StrictModel):
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = Field(None, description="A JSON schema of an object.")
    strict: bool | None = Field(None, description="Calls of this function always fit its parameters.")


class ToolDefinition(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(StrictModel):
    name: str


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: FunctionReference


def _choice_tag(choice: Any) -> str:
    return "a function" if isinstance(choice, dict | NamedToolChoice) else "a word"


Tools = Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MAX_TOOLS)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")] | Annotated[NamedToolChoice, Tag("a function")],
    Discriminator(_choice_tag),
]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request uses its tools.

    Args:
        tools: those that the prompt describes.
        names: of the functions whose calls are looked for in a completion.
        grammar: what the completion must be; None where it is free.
        stop: strings that end the completion, beside those of the request.
    """

    tools: Sequence[dict] = ()
    names: frozenset[str] = frozenset()
    grammar: str | None = None
    stop: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        tools: Sequence[ToolDefinition] | None,
        choice: str | NamedToolChoice | None = None,
        parallel_tool_calls: bool | None = None,
        tokenizer: Any = None,
    ) -> "ToolUse":
        """Raises ApiError for a choice that the tools do not allow."""
        given = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools or ()]
        names = [tool["function"]["name"] for tool in given]
        try:
            check_names(names)
        except RequestError as error:
            raise ApiError(400, str(error), param=error.param) from None
        _check_choice(choice, names)
        if not given or choice == "none":
            return cls()
        parallel = parallel_tool_calls is not False
        if isinstance(choice, NamedToolChoice):
            chosen = [tool for tool in given if tool["function"]["name"] == choice.function.name]
            return cls(given, frozenset([choice.function.name]), tool_call_grammar(chosen, tokenizer, False))
        if choice == "required":
            return cls(given, frozenset(names), tool_call_grammar(given, tokenizer, parallel))
        # With a single call allowed, the completion ends with it.
        stop = () if parallel else (END,)
        return cls(given, frozenset(names), _strict_grammar(given, tools, tokenizer), stop)

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters of a request, with what its tools demand of the completion."""
        params = replace(params, stop=(*params.stop, *self.stop))
        if self.grammar is None:
            return params
        if params.structured is not None:
            message = "tool_choice and strict functions say what the completion must be, and so does another field"
            raise ApiError(400, f"{message}; give one of them", param="tool_choice")
        return replace(params, structured={"grammar": self.grammar})


def _check_choice(choice: str | NamedToolChoice | None, names: Sequence[str]) -> None:
    if not names and choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        message = f"tool_choice.function.name is {choice.function.name!r:.100}, which is not the name of a tool"
        raise ApiError(400, message, param="tool_choice.function.name")


def _strict_grammar(given: Sequence[dict], tools: Sequence[ToolDefinition], tokenizer: Any) -> str | None:
    """Of text and calls, if a function is strict; parameters of one that is not need not fit their schema."""
    if not any(tool.function.strict for tool in tools):
        return None
    functions = [
        tool if model.function.strict else {"function": {"name": model.function.name}}
        for tool, model in zip(given, tools, strict=True)
    ]
    return free_text_grammar(functions, tokenizer)
