"""`mmvllm caption` as a process that is killed or repeated: the next run resumes the output."""

import csv
import random
import signal
import time

import pytest

from tests.helpers.captioning.command import all_but_the_last, by_name, many, recorded, records, until
from tests.helpers.engine.requests import noise_image


@pytest.mark.slow
def test_after_twenty_kills_every_image_is_recorded_once(start, images, names, out):
    moments = random.Random(0)
    options = ("--output", out, "--progress", "none")
    before = b""
    for _ in range(20):
        run = start(names, *options)
        with all_but_the_last(images, names):
            more = min(299, recorded(out) + moments.randrange(10))
            until(lambda least=more: recorded(out) >= least)
            time.sleep(moments.random() * 0.02)
            run.send(signal.SIGKILL)
            assert run.end().code == -signal.SIGKILL
        after = out.read_bytes()
        assert after.startswith(before)  # records are never changed
        before = after[: after.rfind(b"\n") + 1]
    assert start(images, *options).end().code == 0
    assert out.read_bytes().startswith(before)
    assert sorted(by_name(out)) == [f"{i:03}.png" for i in range(300)]
    assert all(record["error"] is None for record in records(out))


@pytest.mark.essential(1)
@pytest.mark.parametrize("suffix", ["csv", "txt"])
def test_after_kills_tables_and_caption_files_are_complete(suffix, start, tmp_path):
    images, out = many(tmp_path / "many", 80), tmp_path / f"out.{suffix}"
    arguments = (images, "--output", out, "--format", suffix, "--progress", "none")
    journal = tmp_path / "out.csv.journal.jsonl" if suffix == "csv" else out
    for i in range(3):
        run = start(*arguments)
        until(lambda least=20 * i + 10: recorded(journal) >= least)
        run.send(signal.SIGKILL)
        run.end()
    assert start(*arguments).end().code == 0
    captions = {record["path"]: record["caption"] for record in by_name(journal).values()}
    if suffix == "csv":
        with out.open(newline="", encoding="utf-8") as file:
            made = {row["path"]: row["caption"] for row in csv.DictReader(file)}
    else:
        made = {str(path.with_suffix(".png")): path.read_text()[:-1] for path in images.glob("*.txt")}
    assert len(captions) == 80
    assert made == captions


def test_repeating_a_finished_run_does_nothing(caption, folder, out):
    assert caption(folder, "--output", out).code == 0
    before = out.read_bytes(), out.stat().st_mtime_ns
    done = caption(folder, "--output", out)
    assert (done.code, done.out) == (0, "")
    assert "skipped" in done.err and "4 (recorded by an earlier run, or given twice)" in done.err
    assert (out.read_bytes(), out.stat().st_mtime_ns) == before


def test_new_images_are_added(caption, folder, out):
    caption(folder, "--output", out)
    before = out.read_bytes()
    noise_image(50, 50, seed=9).save(folder / "0.png")
    assert caption(folder, "--output", out).code == 0
    assert out.read_bytes().startswith(before) and len(by_name(out)) == 5


def test_other_settings_are_refused_with_the_difference(caption, folder, out):
    caption(folder, "--output", out)
    before = out.read_bytes()
    done = caption(folder, "--output", out, "--prompt", "Count!", "--seed", "3")
    assert done.code == 2 and out.read_bytes() == before
    assert "prompt was 'Describe this image.', is 'Count!'; seed was None, is 3" in done.err
    assert "--append-anyway" in done.err and "--overwrite" in done.err and "max_tokens" not in done.err


def test_after_append_anyway_both_settings_can_resume(caption, folder, out):
    caption(folder, "--output", out)
    before = out.read_bytes()
    other = (folder, "--output", out, "--prompt", "Count!")
    assert caption(*other, "--append-anyway").code == 0
    assert out.read_bytes().startswith(before) and len(records(out)) == 8
    assert [record["prompt"] for record in records(out)[4:]] == ["Count!"] * 4
    assert all(record["duplicate_of"] is None for record in records(out))
    for arguments in (other, (folder, "--output", out)):
        assert caption(*arguments).code == 0
        assert len(records(out)) == 8


def test_overwrite_replaces_the_output(caption, folder, out):
    caption(folder, "--output", out)
    assert caption(folder / "000.png", "--output", out, "--prompt", "Count!", "--overwrite").code == 0
    assert [record["prompt"] for record in records(out)] == ["Count!"]
    assert caption(folder, "--output", out, "--prompt", "Count!").code == 0
    assert len(by_name(out)) == 4


@pytest.mark.parametrize(
    "mistake", [["--model", "/no/such/model"], ["--max-tokens", "0"], ["--device", "toaster"], ["--shard", "3/2"]]
)
def test_overwrite_with_wrong_arguments_keeps_the_earlier_output(mistake, caption, folder, out, tmp_path):
    caption(folder, "--output", out)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert caption(folder, "--output", out, "--overwrite", *mistake).code == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("name", ["notes.jsonl", "notes.csv", "notes.parquet"])
def test_a_file_of_another_program_is_refused(name, caption, folder, tmp_path):
    (tmp_path / name).write_text('{"path": "mine"}\n')
    done = caption(folder, "--output", tmp_path / name)
    assert done.code == 2 and "was not made by mmvllm" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"images", name}
    assert (tmp_path / name).read_text() == '{"path": "mine"}\n'


def test_a_damaged_line_is_refused_with_its_number(caption, folder, out):
    caption(folder, "--output", out)
    lines = out.read_bytes().splitlines(keepends=True)
    damaged = b"".join([lines[0], lines[1][:40] + b"\n", *lines[2:]])
    out.write_bytes(damaged)
    done = caption(folder, "--output", out)
    assert done.code == 2 and f"{out}: line 2 is not a record" in done.err
    assert out.read_bytes() == damaged
