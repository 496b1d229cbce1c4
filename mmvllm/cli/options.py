"""Command line options generated from a dataclass: its fields, and the `Args` section of its docstring.

An option that the user does not pass is None, so that the dataclass's default applies.
"""

import argparse
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

from mmvllm.cli.common import at_least_one, context_length, option_name, seconds, whole_number
from mmvllm.config import EngineConfig, literal_choices

Names = Mapping[str, str]
_SAME: Names = MappingProxyType({})
_IS_DURATION = re.compile(r"(^|_)(timeout|seconds|after)$")


def add_options(
    parser: argparse._ActionsContainer,
    cls: type,
    only: Collection[str] | None = None,
    exclude: Collection[str] = (),
    names: Names = _SAME,
    parsers: Mapping[str, Callable[[str], Any]] = MappingProxyType({}),
    **defaults: Any,
) -> None:
    """Add an option for every field of a dataclass, or for those in `only`, except those in `exclude`.

    `names` has the arguments of fields that are not called like their option, `parsers` the argparse types of fields
    whose type does not determine them. `defaults` are this command's defaults. A field's metadata may have the "least"
    integer, None for none, "choices", and a "metavar".
    """
    descriptions = _descriptions(cls, names)
    for field in _chosen(cls, only, exclude):
        default, option = defaults.get(field.name), option_name(names.get(field.name, field.name))
        text = f"{descriptions[field.name]}{_default_text(field, default)}".replace("%", "%%")
        parsing = {"type": parse} if (parse := parsers.get(field.name)) else _parsing(field)
        metavar = {"metavar": field.metadata["metavar"]} if "metavar" in field.metadata else {}
        parser.add_argument(option, default=default, help=text, **parsing | metavar)


def given_options(
    args: argparse.Namespace,
    cls: type,
    only: Collection[str] | None = None,
    exclude: Collection[str] = (),
    names: Names = _SAME,
) -> dict[str, Any]:
    """Return the fields of a dataclass that the user has set, by the options of `add_options`."""
    given = {
        field.name: getattr(args, names.get(field.name, field.name), None) for field in _chosen(cls, only, exclude)
    }
    return {name: value for name, value in given.items() if value is not None}


def listed_options(given: Iterable[str], names: Names = _SAME) -> str:
    """Return the options of these fields, for a message."""
    return ", ".join(option_name(names.get(name, name)) for name in given)


def _chosen(cls: type, only: Collection[str] | None, exclude: Collection[str]) -> list[Field]:
    return [field for field in fields(cls) if (only is None or field.name in only) and field.name not in exclude]


def _parsing(field: Field) -> dict[str, Any]:
    """Return the arguments of `add_argument` that depend on a field's type."""
    kinds = [kind for kind in get_args(field.type) or (field.type,) if kind is not type(None)]
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if field.name == "max_model_len":
        return {"type": context_length, "metavar": "N"}
    if choices := field.metadata.get("choices") or literal_choices(field.type):
        return {"choices": [choice for choice in choices if choice is not None]}
    if int in kinds:
        parse = {None: int, 0: whole_number, 1: at_least_one}[field.metadata.get("least", 1)]
        return {"type": parse, "metavar": "N"}
    if float in kinds:
        return {"type": seconds, "metavar": "S"} if _IS_DURATION.search(field.name) else {"type": float, "metavar": "F"}
    if get_origin(field.type) is tuple:
        return {"type": _comma_separated}
    return {"metavar": field.name.upper()} | ({"type": Path} if {Path, PathLike} & {*kinds} else {})


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _default_text(field: Field, default: Any) -> str:
    value = field.default if default is None else default
    if value in (None, MISSING, (), "") or value is False:
        return ""
    shown = "yes" if value is True else f"{value:g}" if isinstance(value, float) else value
    return f" (default: {shown})"


def _descriptions(cls: type, names: Names) -> dict[str, str]:
    """Return the text of each entry in `Args` of a class's docstring, with fields named as options."""
    _, _, section = (inspect.getdoc(cls) or "").partition("\nArgs:\n")  # None with python -OO
    entries = {
        name: text
        for heading, text in re.findall(r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
        for name in heading.split(", ")
    }
    described = {name for name in (*entries, *names, *(field.name for field in fields(EngineConfig))) if "_" in name}
    found = re.compile(rf"`?\b({'|'.join(described)})\b`?")
    return {
        field.name: found.sub(
            lambda match: option_name(names.get(match[1], match[1])), " ".join(entries.get(field.name, "").split())
        ).rstrip(".")
        for field in fields(cls)
    }
