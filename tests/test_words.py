"""`.ci/words` finds replaced names, phrases and fragments, and leaves good prose alone."""

from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "words"


@pytest.fixture(scope="module")
def words() -> ModuleType:
    return SourceFileLoader("words", str(SCRIPT)).load_module()


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("rows = DeviceRows(4)\n", (1, "DeviceRows is called InputBatch")),
        ("x = 1  # those of the model\n", (1, "'those of'")),
        ('"""A module that\nstands\n  for another."""\n', (1, "'stands for'")),
        ('raise ValueError(f"{n} engines are started anew")\n', (1, "'anew'")),
        ('def f():\n    """Of the model."""\n', (1, "a docstring begins with 'Of the model.'")),
        ('class A:\n    """The same, twice."""\n', (1, "a docstring begins with 'The same, twice.'")),
    ],
)
def test_what_may_not_come_back_is_found(source, finding, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("mmvllm/a.py")
    path.parent.mkdir()
    path.write_text(source)
    assert finding in words.findings(path)


def test_code_and_sentences_are_not_found(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("mmvllm/a.py")
    path.parent.mkdir()
    path.write_text('"""Offers rows. Assigns them."""\n\nthose = of = anew = 1\n')
    assert [*words.findings(path)] == []
