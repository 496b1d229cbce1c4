"""Code blocks of Markdown documents, and the parsing of the commands in them."""

import argparse
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from mmvllm.cli.main import main as mmvllm_main

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))

# Programs that are not part of this project: their commands are not checked.
FOREIGN = ("curl", "ray", "ruff", "pre-commit", ".", "cd", "time", "deactivate", "optimum-cli")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code: `language` is "indented" for one that is indented by four spaces.

    `options` are what follows the language in the line of the fence: {"server": "", "parse": "needs a cluster"}.
    """

    path: Path
    line: int  # of its first line of code, from 1
    language: str
    options: dict[str, str]
    text: str

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """All blocks of a document, in order."""
    return [*_fenced(path), *_indented(path)]


def prose_of(path: Path) -> str:
    """The document with its fenced blocks left empty; line numbers stay."""
    return re.sub(r"^```[^`]*?^```$", lambda match: "\n" * match[0].count("\n"), path.read_text(), flags=re.M | re.S)


def _fenced(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for match in re.finditer(r"^```(\S*) *(.*)\n((?:.*\n)*?)```$", text, re.M):
        options = dict(part.partition("=")[::2] for part in shlex.split(match[2]))
        yield Block(path, text.count("\n", 0, match.start(3)) + 1, match[1], options, match[3])


def _indented(path: Path) -> Iterator[Block]:
    text = prose_of(path)
    for match in re.finditer(r"(?<=\n\n)((?: {4}.*\n)+)", text):
        lines = "".join(line[4:] for line in match[1].splitlines(keepends=True))
        yield Block(path, text.count("\n", 0, match.start()) + 1, "indented", {}, lines)


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each command in shell lines, without comments and variables before the command."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r" (?:&&|\|) ", line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words:
                yield words


def check_command(words: list[str]) -> None:
    """Fail for a command that the project's own parsers and files do not accept."""
    match words:
        case ["pip", "install", *arguments]:
            _check_extras(arguments)
        case ["mmvllm", *arguments] | ["python", "-m", "mmvllm", *arguments]:
            _parse(lambda: mmvllm_main(arguments))
        case ["python", "-m", "pytest", *arguments]:
            _check_markers(arguments)
        case ["python", "-m", "venv" | "tests.helpers.option_tables", *_]:
            pass
        case ["python", script, *arguments]:
            folder = str((ROOT / script).parent)  # which Python puts on the path
            with patch.object(sys, "argv", [script, *arguments]), patch.object(sys, "path", [folder, *sys.path]):
                _parse(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"))
        case [program, *_] if program.startswith(".ci/"):
            assert (ROOT / program).is_file(), f"{program} does not exist"
        case [program, *_]:
            assert program in FOREIGN, f"no rule for checking {shlex.join(words)!r}"


class _Parsed(BaseException):
    """The arguments were accepted."""


def _parse(run) -> None:
    """Run a program up to the point where it has parsed its arguments."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(*args, **keys):
        parse_args(*args, **keys)
        raise _Parsed

    with patch.object(argparse.ArgumentParser, "parse_args", parse_only):
        try:
            run()
        except (_Parsed, SystemExit) as end:
            if isinstance(end, _Parsed) or not end.code:  # --help exits with 0
                return
            raise
    raise AssertionError("the program parsed no arguments")


def _check_extras(arguments: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extras in re.findall(r"(?:mmvllm|\.)\[(.*?)\]", " ".join(arguments)):
        for extra in extras.split(","):
            assert extra in known, f"there is no extra {extra!r}"


def _check_markers(arguments: list[str]) -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    for given in re.findall(r"-m (\w+)", " ".join(arguments)):
        assert given in [marker.partition(":")[0] for marker in markers], f"there is no marker {given!r}"
