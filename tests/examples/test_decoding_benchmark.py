"""The benchmark of decoding in worker processes runs; times are not tested."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))
import decoding


@pytest.mark.spawns
def test_it_prints_a_line_for_each_size(monkeypatch, capsys):
    monkeypatch.setattr(decoding, "SIZES", ((50, 40), (64, 48)))
    monkeypatch.setattr(sys, "argv", ["decoding.py", "--repeat", "1"])
    decoding.main()
    start, _, *lines = capsys.readouterr().out.splitlines()
    assert start.startswith("start of a process") and [line.split()[0] for line in lines] == ["50x40", "64x48"]
