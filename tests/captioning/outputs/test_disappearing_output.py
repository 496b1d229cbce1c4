"""An output that another program deletes, replaces or changes while a run writes to it ends the run with a message."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mmvllm.captioning import CaptionSettings, JobError
from mmvllm.captioning.errors import explained
from mmvllm.captioning.outputs import journal as journal_module
from mmvllm.captioning.outputs.journal import Journal
from mmvllm.captioning.outputs.options import OutputOptions
from mmvllm.captioning.outputs.output import Output
from mmvllm.captioning.outputs.record import COLUMNS
from mmvllm.captioning.sources.items import Item
from mmvllm.errors import ArgumentError
from tests.helpers.captioning.command import all_but_the_last, by_name, recorded, until
from tests.helpers.captioning.pending_tasks import opened, record_all

SETTINGS = CaptionSettings()


def record(name: str, **values) -> dict:
    known = {"path": f"{name}.png", "key": f"{ord(name):032x}", "caption": name, "digest": name}
    return dict.fromkeys(COLUMNS) | known | {"settings": SETTINGS.fingerprint, "prompt": SETTINGS.prompt} | values


@pytest.fixture(autouse=True)
def sync_at_once(monkeypatch):
    monkeypatch.setattr(journal_module, "SYNC_SECONDS", 0.0)


def replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "was deleted by another program"),
    "moved": (lambda path: path.rename(path.with_name("moved.jsonl")), "was moved or replaced by another program"),
    "replaced": (replace, "was deleted by another program"),
    "truncated": (lambda path: os.truncate(path, 10), "was changed by another program"),
    "emptied": (lambda path: os.truncate(path, 0), "was changed by another program"),
    "extended": (lambda path: path.write_text(path.read_text() + "{}\n"), "was changed by another program"),
    "removed with its folder": (lambda path: shutil.rmtree(path.parent), "was deleted by another program"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", ["sync", "end"])
def test_a_changed_output_is_an_error_that_names_what_is_lost(change, moment, tmp_path):
    make, message = CHANGES[change]
    path = tmp_path / "folder/out.jsonl"
    path.parent.mkdir()
    output = Output(SETTINGS, OutputOptions(output=path))
    output.begin()
    for name in "ab":
        output.write(record(name))
    make(path)
    lost = f"{path} {message} .*, and with it {3 if moment == 'sync' else 2} records; put the file back, or run"
    with pytest.raises(JobError, match=lost) as raised:
        output.write(record("c")) if moment == "sync" else output.finish()
    assert raised.value.path == path
    output.close()


def test_caption_files_of_lost_records_are_not_written(here, monkeypatch):
    (here / "texts").mkdir()
    out = Output(SETTINGS, OutputOptions(output=here / "out.jsonl", format="txt", output_dir=here / "texts"))
    out.begin()
    out.write(record("a", file=str(here / "texts/a.txt")))
    monkeypatch.setattr(journal_module, "SYNC_SECONDS", 60.0)
    out.write(record("b", file=str(here / "texts/b.txt")))
    (here / "out.jsonl").unlink()
    with pytest.raises(JobError, match="put the file back, or run the same job again"):
        out.finish()
    out.close()
    assert [path.name for path in (here / "texts").iterdir()] == ["a.txt"]


def test_a_deleted_settings_file_is_written_again(tmp_path):
    path, settings = tmp_path / "out.jsonl", tmp_path / "out.jsonl.settings"
    journal = Journal(path, SETTINGS)
    journal.begin()
    journal.append(record("a"))
    settings.unlink()
    journal.append(record("b"))
    journal.close()
    assert SETTINGS.fingerprint in json.loads(settings.read_text())["settings"]


def test_a_removed_output_folder_is_an_error_and_the_next_run_writes_all_files(here):
    options = {"output": here / "out.jsonl", "format": "txt", "output_dir": Path("texts")}
    message = r"texts was removed or replaced by another program .* run the same job again"
    with pytest.raises(JobError, match=message), opened(SETTINGS, "images", **options) as (output, tasks):
        for task in tasks:
            output.write(record(task.item.path[-5], key=task.key, path=task.item.path, file=task.file))
            shutil.rmtree("texts", ignore_errors=True)
    assert not Path("texts").exists()
    with opened(SETTINGS, "images", **options) as (_, tasks):
        assert tasks == []
    assert Path("texts/a.txt").read_text() == "a\n" and Path("texts/deep/b.txt").read_text() == "b\n"


@pytest.mark.parametrize("is_beside", [False, True])
def test_caption_files_that_are_deleted_during_the_run_are_written_again(is_beside, here, caplog):
    folder = Path("images" if is_beside else "texts")
    output = Output(
        SETTINGS, OutputOptions(output=here / "out.jsonl", format="txt", output_dir=None if is_beside else folder)
    )
    output.begin()
    for name, place in (("a", "a"), ("b", "deep/b")):
        item, key = Item(f"images/{place}.png", f"{place}.png", f"images/{place}.png"), f"{ord(name):032x}"
        output.write(record(name, file=output.claim_file(item, key), path=item.path))
    (folder / "deep/b.txt").unlink()
    output.finish()
    output.close()
    assert (folder / "deep/b.txt").read_text() == "b\n"
    assert "caption files that were deleted during the run are written again: 1" in caplog.text


def test_a_run_whose_output_is_deleted_ends_with_code_1(start, images, names, out):
    run = start(names, "--output", out)
    with all_but_the_last(images, names):
        until(lambda: recorded(out) > 0)
        out.unlink()
    done = run.end()
    assert done.code == 1 and f"{out} was deleted by another program" in done.err
    assert "Traceback" not in done.err and "captioned " not in done.err
    assert start(images, "--output", out).end().code == 0
    assert len(by_name(out)) == 300


# Errors of the operating system


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_an_error_of_the_operating_system_is_a_sentence(number, here, monkeypatch):
    error = OSError(number, os.strerror(number), "somewhere")
    reason = explained(error)
    assert reason.startswith(f"{os.strerror(number)}; ") and "Errno" not in reason

    def fails(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch, pytest.raises(ArgumentError) as raised:
        patch.setattr(os, "open", fails)
        Journal(here / "out.jsonl", SETTINGS)
    assert str(raised.value) == f"{here}/out.jsonl cannot be opened for writing: {reason}"
    with monkeypatch.context() as patch, pytest.raises(ArgumentError, match=f"texts cannot be made: {reason}"):
        patch.setattr(Path, "mkdir", fails)
        Output(SETTINGS, OutputOptions(output=here / "out.jsonl", format="txt", output_dir="texts"))
    journal = Journal(here / "out.jsonl", SETTINGS)
    journal.append(record("a"))
    for called in ("write", "fsync"):
        with monkeypatch.context() as patch, pytest.raises(JobError, match=rf"out\.jsonl cannot be written: {reason}"):
            patch.setattr(os, called, fails)
            journal.append(record("b"))
    journal.close()


def test_settings_that_cannot_be_read_or_written_are_named(here, monkeypatch):
    record_all(SETTINGS, "images", output=here / "out.jsonl")

    def fails(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    with (
        monkeypatch.context() as patch,
        pytest.raises(ArgumentError, match=r"out\.jsonl\.settings cannot be read: Read-"),
    ):
        patch.setattr(Path, "open", fails)
        Journal(here / "out.jsonl", SETTINGS)
    journal = Journal(here / "out.jsonl", SETTINGS)
    with (
        monkeypatch.context() as patch,
        pytest.raises(JobError, match=r"out\.jsonl\.settings cannot be written: Read-"),
    ):
        patch.setattr(Path, "replace", fails)
        journal.append(record("c"))
    journal.close()
