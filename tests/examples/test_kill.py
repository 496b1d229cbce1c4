"""The benchmark that kills captioning: it counts what differs, and finds nothing after a few kills."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))
import kill
from kill import JOBS, Counts, Job, compare, draw, show


@pytest.fixture
def calm(tmp_path) -> Path:
    """What a job in the format txt wrote for two images."""
    folder = tmp_path / "calm"
    (folder / "texts").mkdir(parents=True)
    records = [{"path": f"{name}.png", "caption": name, "time": 1} for name in "ab"]
    (folder / "out.txt").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for name in "ab":
        (folder / f"texts/{name}.txt").write_text(name)
    return folder


def counted(calm: Path, killed: Path) -> Counts:
    counts = Counts()
    compare(Job("txt", "texts"), killed, calm, counts)
    return counts


def test_what_differs_is_counted(calm, tmp_path, capsys):
    killed = tmp_path / "killed"
    shutil.copytree(calm, killed)
    lines = (killed / "out.txt").read_text().splitlines(keepends=True)
    assert not counted(calm, killed).has_failed
    (killed / "out.txt").write_text(lines[0].replace('"time": 1', '"time": 2') + lines[1])
    assert not counted(calm, killed).has_failed
    (killed / "out.txt").write_text(lines[0] * 2)
    assert (counted(calm, killed).records_lost, counted(calm, killed).records_twice) == (1, 1)
    (killed / "out.txt").write_text(lines[0] + lines[1].replace('"caption": "b"', '"caption": "c"'))
    (killed / "texts/a.txt").unlink()
    (killed / "texts/b.txt").write_text("c")
    counts = counted(calm, killed)
    assert (counts.records_different, counts.files_missing, counts.files_different) == (1, 1, 1) and counts.has_failed
    show({"txt": counts})
    assert "| txt | 0 | 0 | 0 | 0 | 0 | 1 | 1 | 1 |" in capsys.readouterr().out


def test_the_images_have_duplicates_and_broken_files(tmp_path):
    draw(tmp_path / "images")
    files = [path for path in (tmp_path / "images").rglob("*.*") if path.is_file()]
    assert len(files) == 18 and len({path.read_bytes() for path in files}) == 15


@pytest.mark.slow
def test_killed_jobs_of_every_format_are_complete_after_they_are_resumed():
    done = subprocess.run([sys.executable, kill.__file__, "14"], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {job.name} |" in done.stdout for job in JOBS)
