"""Command line options for `EngineConfig`, generated from its fields and from the `Args` section of its docstring."""

import argparse
import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import Field, fields
from typing import Any

from mmvllm.cli.common import at_least_one, context_length, option_name
from mmvllm.config import EngineConfig, given_engine_args, literal_choices


def add_engine_arguments(
    parser: argparse._ActionsContainer,
    only: Collection[str] | None = None,
    exclude: Collection[str] = (),
    **defaults: Any,
) -> None:
    """Add an option for every field of `EngineConfig`, or for those in `only`, except those in `exclude`.

    `defaults` are this command's defaults; other options default to None, which leaves the engine's default.
    """
    descriptions = _descriptions()
    for field in _fields(only, exclude):
        default = defaults.get(field.name)
        text = f"{descriptions.get(field.name, '').rstrip('.')}{_default_text(field, default)}".replace("%", "%%")
        parser.add_argument(option_name(field.name), default=default, help=text, **_value_arguments(field))


def engine_arguments(args: argparse.Namespace, exclude: Collection[str] = ()) -> dict[str, Any]:
    """Return the engine arguments that the user passed, by the names of `EngineConfig`'s fields."""
    return {name: value for name, value in given_engine_args(vars(args)).items() if name not in exclude}


def _fields(only: Collection[str] | None, exclude: Collection[str]) -> Iterator[Field]:
    for field in fields(EngineConfig):
        if (only is None or field.name in only) and field.name not in exclude:
            yield field


def _value_arguments(field: Field) -> dict[str, Any]:
    """Return the arguments of `add_argument` that depend on a field's type."""
    if field.type in (bool, bool | None):
        return {"action": argparse.BooleanOptionalAction}
    if field.name == "max_model_len":
        return {"type": context_length, "metavar": "N"}
    if choices := literal_choices(field.type):
        return {"choices": [choice for choice in choices if choice is not None]}
    if field.name == "seed":
        return {"type": int, "metavar": "N"}
    if field.type in (int, int | None):
        return {"type": at_least_one, "metavar": "N"}
    return {"type": float, "metavar": "F"} if field.type is float else {"metavar": field.name.upper()}


def _default_text(field: Field, default: Any) -> str:
    value = field.default if default is None else default
    if value is None:
        return ""
    return f" (default: {('no', 'yes')[value] if isinstance(value, bool) else value})"


def _descriptions() -> dict[str, str]:
    """Return the text of each entry in `Args` of `EngineConfig`'s docstring, with fields named as options."""
    _, _, section = (inspect.getdoc(EngineConfig) or "").partition("\nArgs:\n")  # None with python -OO
    entries = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE))
    names = re.compile(rf"\b({'|'.join(name for name in entries if '_' in name)})\b")
    return {
        name: names.sub(lambda match: option_name(match[0]), " ".join(text.split())) for name, text in entries.items()
    }
