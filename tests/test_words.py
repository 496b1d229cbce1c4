"""`.ci/words` finds replaced names, phrases and fragments, and leaves good prose alone."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "words"


@pytest.fixture(scope="module")
def words() -> ModuleType:
    loader = SourceFileLoader("ci_words", str(SCRIPT))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def found(words, tmp_path, monkeypatch):
    """The findings in a file with this name and text."""
    monkeypatch.chdir(tmp_path)

    def found(name: str, text: str) -> list[tuple[int, str]]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        return [*words.findings(Path(name))]

    return found


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("rows = DeviceRows(4)\n", 1, "DeviceRows is called InputBatch"),
        ("x = 1\n_coded_linear_kernel()\n", 2, "coded_linear is called quantized_linear"),
        ("x = 1  # those of the model\n", 1, "'those of'"),
        ("# the rows of those\n# of the model\nx = 1\n", 1, "'those of'"),
        ('"""A module that\nstands\n  for another."""\n', 1, "'stands for'"),
        ('raise ValueError(f"{n} engines are started anew")\n', 1, "'anew'"),
        ('def f():\n    """Of the model."""\n', 2, "begins with 'Of the model.'"),
        ('class A:\n    """The same, twice."""\n', 2, "begins with 'The same, twice.'"),
        ('def f():\n    """As `g`."""\n', 2, "begins with 'As `g`.'"),
        ('raise E(\n    f"{name} is {value!r}, must be {most}"\n)\n', 2, "X must be Z, got Y"),
    ],
)
def test_what_may_not_come_back_is_found(text, line, what, found):
    assert any(at == line and what in message for at, message in found("mmvllm/a.py", text))


def test_other_files(found):
    assert found("tests/test_coded_linear.py", "")[0][0] == 0
    for name in ("README.md", "docs/a.md"):
        assert found(name, "# A\n\nthose\nof it\n") == [
            (3, "the phrase 'those of' reads badly; write the sentence differently")
        ]


def test_code_and_sentences_are_not_found(found):
    function = 'def f():\n    """As soon as it ends, stop."""\n'
    text = '"""Offers rows. Assigns them."""\n\nthose = of = anew = 1\n\n\n' + function
    assert found("mmvllm/a.py", text + 'E(f"{name} must be at least 1, got {value}")\n') == []
