"""The benchmarks of folder sizes and of the start run; times are not tested."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))
import folder_sizes
import startup

pytestmark = pytest.mark.spawns


def test_every_folder_has_a_line(capsys, tmp_path):
    arguments = ("--counts", "2", "3", "--side", "56", "--max-tokens", "2", "--json", str(tmp_path / "a.jsonl"))
    folder_sizes.main([*arguments])
    header, *rows, line = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "images" and [row.split()[0] for row in rows] == ["2", "3"]
    assert [result["images"] for result in json.loads(line)["results"]] == [2, 3]
    assert (tmp_path / "a.jsonl").read_text() == line + "\n"


def test_options_reach_the_command(monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(startup, "seconds_of", lambda *command: commands.append(command) or (1.0, 2.0))
    startup.main(["--repeat", "1", "--model", "folder", "--", "--dtype", "float32"])
    _, *rows, line = capsys.readouterr().out.splitlines()
    assert [row.split()[-4:] for row in rows] == [["1.00", "1.00", "1.00", "2.00"]] * 3
    assert list(json.loads(line)["results"]) == ["mmvllm caption", "mmvllm --version", "import torch"]
    assert commands[0] == commands[1] and commands[0][-4:] == ("--model", "folder", "--dtype", "float32")


def test_a_command_is_timed_to_its_first_line_and_its_end():
    first, end = startup.seconds_of("-c", "import time; print(1, flush=True); time.sleep(0.3); print(2)")
    assert first + 0.2 < end
    with pytest.raises(SystemExit, match="ended with code 3"):
        startup.seconds_of("-c", "raise SystemExit(3)")


@pytest.mark.slow
def test_the_first_caption_is_timed():
    caption = ("-m", "mmvllm", "caption", str(startup.IMAGE), "--max-tokens", "1", "--progress", "none")
    assert startup.seconds_of(*caption) > (0, 0)
