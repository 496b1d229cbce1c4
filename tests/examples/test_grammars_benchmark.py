"""The benchmark of grammars prints a row for each."""

import runpy

from tests.helpers.documents import ROOT


def test_it_prints_what_each_grammar_costs(capsys):
    program = runpy.run_path(str(ROOT / "examples" / "benchmarks" / "grammars.py"))
    program["main"](["--tokens", "5"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[4:]] == [*program["GRAMMARS"]]
