"""An argument parser whose errors are one line, with a suggestion for a mistyped option, choice or command."""

import argparse
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from mmvllm.utils.text import suggestion


class CommandParser(argparse.ArgumentParser):
    """The parser of a command and, because subparsers have the class of their parent, of its subcommands.

    Options cannot be abbreviated, because an abbreviation may be another command's option. `hints` say what to use
    instead of unsupported options and values ("--option value").
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.hints: dict[str, str] = {}

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # Before argparse reports a missing argument, which may be the value of the mistyped option.
        args = sys.argv[1:] if args is None else args
        for option in self._unknown_options(args):
            hint = f"; {self.hints[option]}" if option in self.hints else suggestion(option, self._known_options)
            self.error(f"there is no option {option}{hint}")
        namespace, extra = super().parse_known_args(args, namespace)
        if extra:
            hint = f"; a model is named with --model {extra[0]}" if "--model" in self._known_options else ""
            self.error(f"unexpected argument {extra[0]!r}{hint}")
        return namespace, extra

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nSee {self.prog} --help.\n")

    def _unknown_options(self, args: Sequence[str]) -> list[str]:
        """Return the words that look like an option and are unknown to this parser."""
        options = []
        for word in args:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                break  # the rest are values, or belong to a subcommand
            if word.startswith("--") and " " not in word:
                options.append(word.partition("=")[0])
        return [option for option in options if option not in self._known_options]

    @property
    def _known_options(self) -> Collection[str]:
        return self._option_string_actions

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        hint = f"{suggestion(str(value), action.choices)} (choose from {', '.join(map(str, action.choices))})"
        hint = f"; {own}" if (own := self.hints.get(f"{(action.option_strings or [''])[0]} {value}")) else hint
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no {action.metavar.lower()} {value!r}{hint}")
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")
