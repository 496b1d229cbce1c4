"""After a resume every record with a caption has its file, or a warning says which has not."""

import json
import shutil
from pathlib import Path

import pytest

from mmvllm.captioning import CaptionSettings
from mmvllm.captioning.outputs.output import Output
from mmvllm.captioning.settings import BESIDE_IMAGES
from tests.helpers.captioning.pending_tasks import left, opened, record_all

BESIDE = CaptionSettings(caption_files=f"txt {BESIDE_IMAGES}")
TEXTS = CaptionSettings(caption_files="txt texts")
IN_TEXTS = {"format": "txt", "output_dir": Path("texts")}


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.txt")}


BOTH = {"a.txt": "a a.png\n", "deep/b.txt": "a b.png\n"}


@pytest.mark.parametrize("lost", ["texts/deep", "texts", "texts/a.txt", "texts/deep/b.txt"])
def test_below_the_output_folder_files_are_restored_with_their_folders(lost, here, out):
    record_all(TEXTS, "images", output=out, **IN_TEXTS)
    assert texts(here / "texts") == BOTH
    shutil.rmtree(lost, ignore_errors=True)
    Path(lost).unlink(missing_ok=True)
    assert left(TEXTS, "images", output=out, **IN_TEXTS) == []
    assert texts(here / "texts") == BOTH


def test_the_output_folder_is_made_and_left_only_if_something_is_in_it(here):
    nested = {"format": "txt", "output_dir": Path("new/texts")}
    settings = CaptionSettings(caption_files="txt new/texts")
    Output(settings, None, **nested).close()
    assert not Path("new/texts").exists()
    record_all(settings, "images", output=None, **nested)
    assert texts(here / "new/texts") == BOTH and Path("new/texts/captions.jsonl").exists()
    Path("file").touch()
    with pytest.raises(ValueError, match="output_dir file is not a folder; choose another"):
        Output(settings, None, "txt", Path("file"))
    with pytest.raises(ValueError, match=r"output_dir file/sub cannot be made: Not a directory"):
        Output(settings, None, "txt", Path("file/sub"))
    assert not Path("file").is_dir()


@pytest.mark.parametrize("place", ["images", "/images", ".."])
def test_beside_images_files_are_restored_from_any_working_directory(place, here, out, monkeypatch):
    given = here / "images" if place == "/images" else "images"
    record_all(BESIDE, given, output=out, format="txt")
    (here / "images/a.txt").unlink()
    (here / "images/deep/b.txt").write_text("")  # as after a power failure
    if place == "..":
        monkeypatch.chdir(here / "images")
        given = "."
    assert left(BESIDE, given, output=out, format="txt") == []
    assert texts(here) == {f"images/{name}": text for name, text in BOTH.items()}


def test_a_file_is_not_written_where_only_the_relative_path_is_equal(here, out, tmp_path, monkeypatch, caplog):
    record_all(BESIDE, "images", output=out, format="txt")
    (here / "images/a.txt").unlink()
    shutil.copytree(here, tmp_path / "other", ignore=shutil.ignore_patterns("*.txt"))
    (tmp_path / "other/images/c.png").touch()
    monkeypatch.chdir(tmp_path / "other")
    record_all(BESIDE, "images/c.png", output=out, format="txt")
    assert texts(tmp_path / "other") == {"images/c.txt": "a c.png\n"}
    assert "caption files of recorded images are missing: 1\nimages/a.txt: its image was not found" in caplog.text


def test_a_moved_tree_has_its_files_restored(here, out, tmp_path, monkeypatch):
    record_all(BESIDE, "images", output=out, format="txt")
    here.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    Path("images/a.txt").unlink()
    assert left(BESIDE, "images", output=out, format="txt") == []
    assert texts(tmp_path / "moved/images") == BOTH


def test_files_that_cannot_be_restored_are_named(here, out, caplog):
    record_all(BESIDE, "images", output=out, format="txt")
    shutil.rmtree("images/deep")
    assert left(BESIDE, "images", output=out, format="txt") == []
    assert "are missing: 1\nimages/deep/b.txt: its image was not found by this run" in caplog.text
    assert not Path("images/deep").exists()
    caplog.clear()
    record_all(TEXTS, "images", output=out.with_suffix(".2"), **IN_TEXTS)
    Path("texts/a.txt").unlink()
    Path("texts/a.txt").mkdir()
    (Path("texts/a.txt") / "x").touch()
    with opened(TEXTS, "images", output=out.with_suffix(".2"), **IN_TEXTS) as (_, tasks):
        assert tasks == []
    assert "are missing: 1\ntexts/a.txt cannot be written: Is a directory" in caplog.text


# Where files of others are to be written, and the path of the record that says so.
ELSEWHERE = {
    "another name": ("texts/__init__.py", "images/a.png"),
    "another suffix": ("texts/a.py", "images/a.png"),
    "hidden": ("texts/.git/hooks/a.txt", "images/a.png"),
    "no such image": ("texts/new/x.txt", "/nowhere/x.png"),
    "outside": ("texts/../a.txt", "images/a.png"),
    "absolute": ("/tmp/texts/a.txt", "images/a.png"),
    "not an image": ("texts/notes.txt", "notes.md"),
}


@pytest.mark.parametrize(("file", "path"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_record_does_not_say_which_files_are_written_below_the_output_folder(file, path, here, out):
    record_all(TEXTS, "images", output=out, **IN_TEXTS)
    Path("notes.md").touch()
    first, *others = [json.loads(line) for line in out.read_text().splitlines()]
    changed = first | {"file": file, "path": path, "caption": "print('owned')"}
    out.write_text("".join(f"{json.dumps(one)}\n" for one in (changed, *others)))
    Path("texts/__init__.py").touch()
    before = {one: one.read_bytes() for one in here.rglob("*") if one.is_file()}
    Path("texts/a.txt").unlink()
    left(TEXTS, "images", output=out, **IN_TEXTS)
    after = {one: one.read_bytes() for one in here.rglob("*") if one.is_file()}
    assert {one for one in after if after[one] != before.get(one)} <= {here / "texts/a.txt"}


def test_a_record_without_a_caption_has_no_file(here, out):
    record_all(TEXTS, "images", output=out, **IN_TEXTS)
    lines = [json.loads(line) | {"error": "is damaged", "caption": None} for line in out.read_text().splitlines()]
    out.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    shutil.rmtree("texts")
    left(TEXTS, "images", output=out, **IN_TEXTS)
    assert texts(here) == {}
