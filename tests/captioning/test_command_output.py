"""`mmvllm caption` as a process: outputs that cannot be written, and what it prints."""

import csv
import json
import os
from pathlib import Path

import pytest

from tests.helpers.captioning.command import by_name, many, recorded, until


def test_an_output_that_may_not_be_written_is_refused(caption, folder, out, tmp_path):
    out.write_text("")
    out.chmod(0o444)
    (tmp_path / "closed").mkdir(mode=0o555)
    for path in (out, tmp_path / "closed/out.jsonl", tmp_path / "closed/out.csv", Path("/proc/out.jsonl"), tmp_path):
        done = caption(folder, "--output", path)
        assert done.code == 2 and done.err.startswith("mmvllm caption: ") and str(path) in done.err
        assert "Traceback" not in done.err
    done = caption(folder, "--format", "txt", "--output-dir", tmp_path / "closed")
    assert done.code == 2 and "Permission denied" in done.err


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt"])
def test_a_full_disk_ends_the_run_and_the_same_command_finishes_it(suffix, caption, tmp_path):
    images, out = many(tmp_path / "many", 40), tmp_path / f"out.{suffix}"
    arguments = (images, "--output", out, "--format", suffix)
    done = caption(*arguments, max_bytes=10_000)
    journal = tmp_path / "out.csv.journal.jsonl" if suffix == "csv" else out
    made = by_name(journal)
    assert done.code == 1 and "Traceback" not in done.err
    assert f"{journal} cannot be written: File too large" in done.err
    missing = done.err.partition("In flight and not recorded: ")[2].partition(".png")[0]
    assert missing.startswith(str(images)) and f"{os.path.basename(missing)}.png" not in made
    assert 0 < len(made) < 40 and journal.stat().st_size <= 10_000
    assert caption(*arguments).code == 0
    assert len(by_name(journal)) == 40
    if suffix == "csv":
        assert len(list(csv.DictReader(out.open(newline="")))) == 40
    if suffix == "txt":
        assert len(list(images.glob("*.txt"))) == 40
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_disk_that_is_full_from_the_start_is_a_message(caption, folder, out, tmp_path):
    done = caption(folder, "--output", out, max_bytes=150 + len(str(out)))  # the limit also applies to standard error
    assert done.code in (1, 2) and "Traceback" not in done.err and "File too large" in done.err
    assert caption(folder, "--output", out).code == 0
    assert len(by_name(out)) == 4


def test_a_second_run_into_the_same_output_is_refused(start, caption, images, tmp_path, out):
    os.mkfifo(tmp_path / "fifo")
    first = start("-", "--output", out, stdin=tmp_path / "fifo")
    with (tmp_path / "fifo").open("w") as lines:
        print(images / "000.png", file=lines, flush=True)
        until(lambda: recorded(out) == 1)
        for option in ((), ("--overwrite",), ("--append-anyway", "--prompt", "Count!")):
            done = caption(images, "--output", out, *option)
            assert done.code == 2 and f"{out}: another run is writing to it" in done.err
        print(*images.glob("*.png"), sep="\n", file=lines, flush=True)
    assert first.end().code == 0
    assert len(by_name(out)) == 300


def test_an_input_list_cannot_be_the_output(caption, folder, tmp_path):
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps({"image": str(folder / "000.png")}) + "\n")
    done = caption(path, "--output", path, "--overwrite")
    assert path.exists() and json.loads(path.read_text())["image"]  # it was neither truncated nor deleted
    assert done.code == 2 and str(path) in done.err


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_an_output_that_is_not_a_regular_file_is_refused_and_kept(kind, start, folder, out):
    if kind == "fifo":
        os.mkfifo(out)
    else:
        out.symlink_to("/dev/null")  # not the device itself, which a defect would delete
    done = start(folder, "--output", out).end()
    assert os.path.lexists(out)
    assert done.code == 2 and "is not a regular file" in done.err


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize("place", ["", ".settings", ".journal.jsonl", ".journal.jsonl.settings", "report"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_nothing_is_written_through_links_or_read_from_pipes(caption, folder, tmp_path, suffix, place, kind):
    """A folder that comes from others may have them in the place of an output."""
    out, victim = tmp_path / f"captions.{suffix}", tmp_path / "victim"
    path = tmp_path / "report.html" if place == "report" else out.with_name(f"{out.name}{place}")
    if (suffix == "csv") != place.startswith(".journal") and place not in ("", "report"):
        return
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim)
    if kind == "link":
        victim.write_text("precious")
    if place == "" and suffix == "csv":
        out.with_name(f"{out.name}.journal.jsonl").touch()
    report = ["--report", tmp_path / "report.html"] if place == "report" else []
    done = caption(folder, "--output", out, *report)
    assert done.code == 2 and f"{path.name} is not a regular file" in done.err
    assert (victim.read_text() if kind == "link" else victim.exists()) == ("precious" if kind == "link" else False)
    assert path.is_symlink() or kind == "pipe"


def test_an_image_in_a_locked_folder_does_not_end_the_run(caption, folder, out, tmp_path):
    (tmp_path / "locked").mkdir(mode=0)
    (tmp_path / "list.txt").write_text(f"{tmp_path}/locked/a.png\n{folder}/000.png\n")
    done = caption(tmp_path / "list.txt", "--output", out, "--format", "txt")
    assert done.code == 3, done.err
    assert by_name(out)["000.png"]["error"] is None


def test_captions_go_to_stdout_and_messages_to_stderr(caption, folder, tmp_path):
    (folder / "bad.png").write_text("none")
    done = caption(folder, "--format", "jsonl")
    made = [json.loads(line) for line in done.out.splitlines()]
    assert done.code == 3 and {os.path.basename(r["path"]) for r in made} == {path.name for path in folder.iterdir()}
    assert "captioned" in done.err and "failed" in done.err


@pytest.mark.parametrize("mode", ["auto", "log", "bar", "none"])
def test_progress_is_shown_on_stderr_alone(mode, caption, folder, out):
    done = caption(folder, "--output", out, "--progress", mode)
    assert (done.code, done.out) == (0, "")
    assert ("captioned" in done.err) == (mode != "none")
    assert ("%|" in done.err) == (mode == "bar")


def test_presets_are_listed(caption):
    done = caption("--list-presets")
    assert done.code == 0
    assert [line.partition(":")[0] for line in done.out.splitlines()] == [
        "short",
        "detailed",
        "alt-text",
        "tags",
        "ocr",
        "boxes",
        "tags-json",
        "product-json",
    ]
