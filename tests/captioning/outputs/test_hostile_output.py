"""Outputs that come from others: what their records and settings say takes no time and no memory."""

import json
import time
from pathlib import Path

import pytest

from mmvllm.captioning import CaptionSettings
from mmvllm.captioning.outputs.journal import Journal
from mmvllm.captioning.outputs.report import write_report
from mmvllm.captioning.outputs.settings_file import MAX_SETTINGS
from mmvllm.captioning.outputs.tables import write_parquet
from mmvllm.errors import ArgumentError
from tests.helpers.captioning.pending_tasks import left, record_all

SETTINGS = CaptionSettings()


@pytest.fixture
def out(tmp_path, monkeypatch) -> Path:
    """An output with a record of images/a.png."""
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    Path("images/a.png").touch()
    record_all(SETTINGS, "images", output=tmp_path / "out.jsonl")
    return tmp_path / "out.jsonl"


def add(out: Path, **values) -> dict:
    record = json.loads(out.read_text().splitlines()[0]) | {"key": "1" * 32, **values}
    with out.open("a") as file:
        file.write(f"{json.dumps(record)}\n")
    return record


LONG = {"folders": "a/" * 1_500_000 + "b.mp4", "tars": ".tar/" * 600_000, "one name": "a" * 3_000_000}


@pytest.mark.parametrize("path", LONG.values(), ids=LONG)
@pytest.mark.parametrize("start", [None, 0.0])
def test_a_long_path_takes_no_time(path, start, out, tmp_path):
    record = add(out, path=path, start=start, end=start and 1.0)
    begin = time.process_time()
    assert left(SETTINGS, "images", output=out) == []
    write_report(tmp_path / "report.html", [record], {})
    assert time.process_time() - begin < 5


def test_nan_is_read_as_null(out):
    add(out, seconds=float("nan"), object={"a": [float("inf")]})
    journal = Journal(out, SETTINGS)
    journal.begin()
    (_, record) = journal.records()
    journal.close()
    assert record["seconds"] is None and record["object"] == {"a": [None]}


@pytest.mark.parametrize("values", [{"time": 2**62}, {"start": 2**53 + 1}, {"seconds": -(2**60)}])
def test_a_number_that_no_column_has_is_refused(values, out):
    add(out, **values)
    journal = Journal(out, SETTINGS)
    with pytest.raises(ArgumentError, match="line 2 is not a record of a caption"):
        journal.begin()
    journal.close()


def test_the_largest_numbers_that_are_accepted_fit_into_a_table(out, tmp_path):
    add(out, time=2**53, start=-(2**53), end=0, width=2**63 - 1, seconds=float("inf"))
    journal = Journal(out, SETTINGS)
    journal.begin()
    write_parquet(tmp_path / "out.parquet", journal.records(), [], {})
    journal.close()


def test_times_that_are_almost_equal_have_no_throughput(out, tmp_path):
    record = json.loads(out.read_text())
    records = [record | {"time": 5e-324 * (i // 50), "key": f"{i:032x}"} for i in range(200)]
    write_report(tmp_path / "report.html", records, {})


def test_settings_of_many_jobs_make_no_more_columns_than_those_of_one(out):
    path = out.with_name("out.jsonl.settings")
    content = json.loads(path.read_text())
    for i in range(900):
        content["settings"][f"{i:016x}"] = {"prompts": [{"name": f"a{i}", "prompt": "x"}], "n": 16_384}
    path.write_text(json.dumps(content))
    journal = Journal(out, SETTINGS)
    begin = time.process_time()
    assert len(journal.caption_columns()) == 16_384 and time.process_time() - begin < 2
    journal.close()
    content["settings"]["0" * 16]["n"] = 16_385
    path.write_text(json.dumps(content))
    with pytest.raises(ArgumentError, match="settings make more than 16384 captions of an image"):
        Journal(out, SETTINGS)


@pytest.mark.parametrize("version", ["\x1b]0;pwn\x07", "x" * 5000, ["\x1b"], 10**50])
def test_a_version_of_others_is_shown_shortly_and_without_control_characters(version, out):
    out.with_name("out.jsonl.settings").write_text(json.dumps({"version": version}))
    with pytest.raises(ArgumentError, match="was written by another version") as error:
        Journal(out, SETTINGS)
    assert str(error.value).isprintable() and len(str(error.value)) < 600


def test_settings_that_are_written_can_be_read(out):
    path = out.with_name("out.jsonl.settings")
    for number in range(MAX_SETTINGS - 1, MAX_SETTINGS + 2):
        content = json.loads(path.read_text())
        content["settings"] = {f"{i:016x}": {"prompt": str(i)} for i in range(min(number, MAX_SETTINGS))}
        path.write_text(json.dumps(content))
        record_all(CaptionSettings(prompt=f"new {number}"), "images", output=out, append_anyway=True)
    journal = Journal(out, CaptionSettings(prompt="newest"), append_anyway=True)
    assert len(journal.made_with.known) == MAX_SETTINGS
    journal.close()


def test_a_job_whose_output_could_not_be_resumed_is_refused():
    with pytest.raises(ArgumentError, match="n and prompts make 20000 captions per image, more than 16384"):
        CaptionSettings(prompts=["a", "b"], n=10_000, temperature=1.0)
