"""The benchmarks of folder sizes and of the start run; times are not tested."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))
import folder_sizes
import startup


def test_every_folder_has_a_line(capsys, tmp_path):
    arguments = ("--counts", "2", "3", "--side", "56", "--max-tokens", "2", "--json", str(tmp_path / "a.jsonl"))
    folder_sizes.main([*arguments])
    header, *rows, line = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "images" and [row.split()[0] for row in rows] == ["2", "3"]
    assert [result["images"] for result in json.loads(line)["results"]] == [2, 3]
    assert (tmp_path / "a.jsonl").read_text() == line + "\n"


def test_options_reach_the_command(capsys):
    startup.main(["--repeat", "1", "--max-tokens", "1", "--", "--dtype", "float32", "--skip-warmup"])
    _, *rows, line = capsys.readouterr().out.splitlines()
    results = json.loads(line)["results"]
    assert len(rows) == 3 and list(results) == ["mmvllm caption", "mmvllm --version", "import torch"]
    assert all(len(runs) == 2 and runs[0][0] <= runs[0][1] for runs in results.values())
