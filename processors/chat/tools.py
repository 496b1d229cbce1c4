"""Check a request's tools, which are functions that the model may call, and put tools and calls into prompts.

For templates without tools, such as Qwen2-VL's and Qwen2.5-VL's, tools are converted to the text that the templates of
Qwen2.5 and Qwen3 write: the Hermes format, with functions within <tools> and calls within <tool_call>.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from mmvllm.errors import RequestError
from mmvllm.processors.chat.template_kwargs import MAX_VALUES, json_object_copy
from mmvllm.processors.chat.tool_calls import read_arguments
from mmvllm.structured.schema_keywords import without_nulls
from mmvllm.utils.text import has_more_values

logger = logging.getLogger(__name__)

MAX_TOOLS = 128
NAME = r"[A-Za-z0-9_.:-]{1,128}"
DEFAULT_SYSTEM = "You are a helpful assistant."  # what the templates without tools write
INTRODUCTION = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def check_tools(tools: Any) -> list[dict]:
    """Return a copy of `tools` in the format of OpenAI's API; [] for None. Raises RequestError that names the field."""
    if tools is None:
        return []
    if not isinstance(tools, list | tuple):
        raise _error("tools", f"must be a list of functions, got {type(tools).__name__}")
    if len(tools) > MAX_TOOLS:
        raise _error("tools", f"must have at most {MAX_TOOLS} functions, got {len(tools)}")
    checked = [_checked(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    check_names([tool["function"]["name"] for tool in checked])
    return checked


def check_names(names: Sequence[str]) -> None:
    """Raise RequestError for two functions with the same name."""
    for i, name in enumerate(names):
        if name in names[:i]:
            raise _error(f"tools[{i}].function.name", f"must be unique, got {name!r} as in another function")


def check_parameters(schema: Any, param: str = "parameters") -> dict:
    """Return a copy of a function's JSON schema; raises RequestError if it does not describe an object."""
    if not isinstance(schema, Mapping) or not all(isinstance(key, str) for key in schema):
        raise _error(param, f"must be a JSON schema, an object, got {type(schema).__name__}")
    schema = without_nulls(json_object_copy(schema, lambda reason: _error(param, reason)))
    if schema.get("type", "object") != "object":
        raise _error(param, f"must have the type 'object', got {schema['type']!r:.50}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not all(isinstance(item, Mapping | bool) for item in properties.values()):
        raise _error(param, "must have an object of JSON schemas as 'properties'")
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise _error(param, "must have a list of names as 'required'")
    return schema


def check_calls(message: Mapping[str, Any], path: str) -> list[dict]:
    """Return the calls of an assistant message, with arguments as objects; raises RequestError that names the field.

    Arguments that are not a JSON object are replaced by an empty one.
    """
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise _error(f"{path}.tool_calls", f"must be a list, got {type(calls).__name__}")
    return [_checked_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]


def arguments_as_text(given: Any) -> str:
    """Return the arguments of an earlier call as text; a string is not parsed, which could take long."""
    return given if isinstance(given, str) else _json(_arguments_of_history(given))


def for_template(messages: list[dict], tools: list[dict], reads_tools: bool) -> tuple[list[dict], dict[str, Any]]:
    """Return messages and arguments for a template; unless it reads tools, messages contain the tools as text."""
    if reads_tools:
        return messages, {"tools": tools} if tools else {}
    if not tools and not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        return messages, {}
    return _in_hermes_format(messages, tools), {}


def _checked(tool: Any, path: str) -> dict:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise _error(path, "must be a dict with 'type', \"function\", and 'function'")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _error(f"{path}.function", f"must be a dict with 'name', got {type(function).__name__}")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise _error(f"{path}.function.name", f"must be 1 to 128 of A-Z, a-z, 0-9, _, ., : and -, got {name!r:.150}")
    if not isinstance(description, str | None):
        raise _error(f"{path}.function.description", f"must be a string, got {type(description).__name__}")
    made = {"name": name} | ({} if description is None else {"description": description})
    if (parameters := function.get("parameters")) is not None:
        made["parameters"] = check_parameters(parameters, f"{path}.function.parameters")
    return {"type": "function", "function": made}


def _checked_call(call: Any, path: str) -> dict:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _error(f"{path}.function", "must be a dict with 'name' and 'arguments'")
    made = {"name": function["name"], "arguments": _arguments_of_history(function.get("arguments"))}
    return {"type": "function", "function": made}


def _arguments_of_history(given: Any) -> dict:
    """Return the arguments of an earlier call as an object, which is empty if they are missing or not a JSON object.

    A model may have written anything, and a client that cannot change the history must be able to continue.
    """
    if given is None or given == "":
        return {}
    arguments = read_arguments(given) if isinstance(given, str) else given
    with suppress(RequestError):
        if isinstance(arguments, Mapping) and not has_more_values(arguments, MAX_VALUES):
            return json_object_copy(arguments, RequestError)
    _warn("a request has arguments of an earlier call that are not a JSON object; the model is shown {}; told once")
    return {}


@cache
def _warn(message: str) -> None:
    logger.warning(message)


def _in_hermes_format(messages: list[dict], tools: list[dict]) -> list[dict]:
    """Convert tools, calls and results to text in messages of the roles system, user and assistant."""
    made: list[dict] = []
    for i, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "tool":
            content = _joined("<tool_response>\n", content, "\n</tool_response>")
            if i and messages[i - 1]["role"] == "tool":
                made[-1] = {"role": "user", "content": _joined(made[-1]["content"], "\n", content)}
                continue
            message = {"role": "user"}
        elif calls := message.get("tool_calls"):
            content = _joined(content, "\n" if content else "", "\n".join(map(_call_text, calls)))
            message = {key: value for key, value in message.items() if key != "tool_calls"}
        made.append({**message, "content": content})
    if not tools:
        return made
    has_system = made[0]["role"] == "system"
    before, rest = (made[0]["content"], made[1:]) if has_system else (DEFAULT_SYSTEM, made)
    text = INTRODUCTION.format(tools="\n".join(map(_json, tools)))
    return [{"role": "system", "content": _joined(before, text)}, *rest]


def _call_text(call: dict) -> str:
    function = call["function"]
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {_json(function["arguments"])}}}\n</tool_call>'


def _joined(*contents: str | list[dict]) -> str | list[dict]:
    """Concatenate contents to a string if all of them are strings, otherwise to a list of parts."""
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    parts = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents if one)
    return [part for group in parts for part in group]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # as transformers' filter `tojson` writes it


def _error(param: str, reason: str) -> RequestError:
    return RequestError(f"{param} {reason}", param=param)
