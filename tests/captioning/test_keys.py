"""An image is recorded once, however its path is typed; other images with an equal relative path are not."""

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from mmvllm.captioning import CaptionSettings
from mmvllm.captioning.sources.find import find_items
from tests.helpers.captioning.pending_tasks import left, opened, record_all

SETTINGS = CaptionSettings()


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


def spellings(here: Path) -> list:
    return ["images", "./images/", "link", here / "images", here / "link", "images/../images", "images/**/*.png"]


def test_a_folder_is_the_same_images_however_it_is_typed(here, out):
    record_all(SETTINGS, "images", output=out)
    assert [left(SETTINGS, path, output=out) for path in spellings(here)] == [[]] * 7
    assert left(SETTINGS, *spellings(here), output=None) == ["images/a.png", "images/deep/b.png"]


def test_failed_images_are_the_same_however_they_are_typed(here, out):
    record_all(SETTINGS, "images", output=out, failing=["a.png"])
    for path in spellings(here):
        record_all(SETTINGS, path, output=out, failing=["a.png"], retry_failed=True)
        with opened(SETTINGS, path, output=out) as (output, tasks):
            assert (output.index.count_failed(), tasks) == (1, [])
    assert len(out.read_text().splitlines()) == 2


def test_failures_with_other_settings_are_not_those_of_this_run(here, out):
    record_all(SETTINGS, "images", output=out, failing=["a.png", "b.png"])
    other = CaptionSettings(prompt="Count!")
    record_all(other, "images", output=out, failing=["a.png"], append_anyway=True)
    for settings, number in ((SETTINGS, 2), (other, 1)):
        with opened(settings, "images", output=out) as (output, _):
            assert output.index.count_failed() == number


def test_an_unreadable_line_still_counts_as_failed_after_a_retry(here, out):
    Path("list.jsonl").write_text('{"image": "images/a.png"}\nno JSON\n')
    record_all(SETTINGS, "list.jsonl", output=out, failing=["a.png"])
    with opened(SETTINGS, "list.jsonl", output=out, retry_failed=True) as (output, tasks):
        for task in tasks:
            output.write(
                dict.fromkeys(("id", "file", "finish_reason"))
                | {
                    "key": task.key,
                    "error": "is damaged",
                    "settings": SETTINGS.fingerprint,
                    "path": task.item.path,
                    "prompt": SETTINGS.prompt,
                }
            )
    assert output.index.count_failed() == 2


def test_equal_relative_paths_in_other_working_directories_are_other_images(here, out, tmp_path, monkeypatch):
    record_all(SETTINGS, "images", output=out)
    shutil.copytree(here, tmp_path / "other", symlinks=True)
    monkeypatch.chdir(tmp_path / "other")
    assert left(SETTINGS, "images", output=out) == ["images/a.png", "images/deep/b.png"]


def test_links_to_a_file_are_images_with_names_of_their_own(here, out):
    os.symlink("a.png", "images/c.png")
    assert left(SETTINGS, "images", output=out) == ["images/a.png", "images/c.png", "images/deep/b.png"]


def test_lists_and_tars_are_the_same_however_they_are_typed(here, out):
    Path("images/list.txt").write_text("a.png\ndeep/b.png\nhttp://x.test/c.png\n")
    Path("images/list.jsonl").write_text('{"image": "data:image/png;base64,AAAA"}\n')
    with tarfile.open("images/shard.tar", "w") as tar:
        tar.add("images/a.png", "a.png")
        tar.add("images/a.png", "../a.png")
    names = ("list.txt", "list.jsonl", "shard.tar")
    record_all(SETTINGS, *(f"images/{name}" for name in names), output=out)
    assert len(out.read_text().splitlines()) == 6
    for folder in ("./images", "link", here / "images"):
        assert left(SETTINGS, *(os.path.join(folder, name) for name in names), output=out) == []


def test_a_member_of_a_tar_is_not_the_file_beside_the_tar(here, out):
    with tarfile.open("images/a.tar", "w") as tar:
        tar.add("images/a.png", "../a.png")
        tar.add("images/a.png", "b/../../a.png")
    images = os.path.realpath(here / "images")
    record_all(SETTINGS, f"{images}/a.tar", output=out)
    assert left(SETTINGS, images, output=out) == [f"{images}/a.png", f"{images}/deep/b.png"]


@pytest.mark.parametrize("path", ["http://x.test/a.png", "-:3", "file:///x/a.png", "loop/a.png"])
def test_what_has_no_real_path_keeps_the_path_that_was_typed(path, here):
    os.symlink("loop", "loop")
    items = list(find_items(["list.txt"])) if Path("list.txt").write_text(f"{path}\n") else []
    assert [item.real_path.endswith(path) for item in items] == [True]
