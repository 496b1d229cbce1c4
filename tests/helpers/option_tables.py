"""Tables of options and of memory in the documents, generated from the code.

    python -m tests.helpers.option_tables

writes them between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import argparse
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from importlib import import_module

from mmvllm.config import EngineConfig
from mmvllm.sampling_params import SamplingParams
from tests.helpers.documents import DOCUMENTS
from tests.helpers.models.device_memory import memory_rows

MARKED = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.S)


def _rows(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [[*header], *rows]
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]]) + "\n"


def fields_table(cls: type) -> str:
    """Fields, defaults and the `Args` section of a dataclass."""
    section = inspect.getdoc(cls).partition("\nArgs:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    defaults = {field.name: field.default for field in fields(cls)}
    assert texts.keys() == defaults.keys() and MISSING not in defaults.values(), f"{cls.__name__} is not documented"
    rows = ((f"`{name}`", f"`{defaults[name]!r}`", text) for name, text in texts.items())
    return _rows(("name", "default", "meaning"), rows)


def command_table(command: str) -> str:
    """The options of a command, without the engine's."""
    parser = argparse.ArgumentParser()
    import_module(f"mmvllm.cli.{command}").add_arguments(parser)
    actions = [action for group in parser._action_groups if group.title != "engine" for action in group._group_actions]
    shown = (action for action in actions if action.help != argparse.SUPPRESS and action.dest != "help")
    rows = (_option(parser, action) for action in shown if action.option_strings)
    return _rows(("option", "default", "meaning"), rows)


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str]:
    text, default = parser._get_formatter()._expand_help(action), ""
    if match := re.search(r"(?:^| \()default: (.*?)\)?$", text):
        text, default = text[: match.start()], match[1]
    value = "" if action.nargs == 0 else action.metavar or "{" + ",".join(map(str, action.choices or ())) + "}"
    if value == "{}":
        value = action.dest.upper()
    is_switch = isinstance(action, argparse.BooleanOptionalAction)
    option = action.option_strings[0 if is_switch and default != "yes" else -1]
    return f"`{' '.join(filter(None, (option, value)))}`", default, text


TABLES: dict[str, Callable[[], str]] = {
    "EngineConfig": lambda: fields_table(EngineConfig),
    "SamplingParams": lambda: fields_table(SamplingParams),
    "memory of each device": lambda: _rows(*memory_rows()),
    "mmvllm caption": lambda: command_table("caption"),
    "mmvllm demo": lambda: command_table("demo"),
    "mmvllm serve": lambda: command_table("serve"),
}


def with_tables(text: str) -> str:
    """The document with its tables as the code has them."""
    return MARKED.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


if __name__ == "__main__":
    for path in DOCUMENTS:
        path.write_text(with_tables(path.read_text()))
