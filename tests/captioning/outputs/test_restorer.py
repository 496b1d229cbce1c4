"""After a resume every record with a caption has its file, or a warning says which has not."""

import json
import shutil
from pathlib import Path

import pytest

from mmvllm.captioning import CaptionSettings
from mmvllm.captioning.outputs.options import OutputOptions
from mmvllm.captioning.outputs.output import Output
from tests.helpers.captioning.pending_tasks import left, opened, record_all

SETTINGS = CaptionSettings()
IN_TEXTS = {"format": "txt", "output_dir": Path("texts")}


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.txt")}


BOTH = {"a.txt": "a a.png\n", "deep/b.txt": "a b.png\n"}


@pytest.mark.parametrize("lost", ["texts/deep", "texts", "texts/a.txt", "texts/deep/b.txt"])
def test_below_the_output_folder_files_are_restored_with_their_folders(lost, here, out):
    record_all(SETTINGS, "images", output=out, **IN_TEXTS)
    assert texts(here / "texts") == BOTH
    shutil.rmtree(lost, ignore_errors=True)
    Path(lost).unlink(missing_ok=True)
    assert left(SETTINGS, "images", output=out, **IN_TEXTS) == []
    assert texts(here / "texts") == BOTH


def test_a_changed_file_is_kept(here, out):
    record_all(SETTINGS, "images", output=out, **IN_TEXTS)
    Path("texts/a.txt").write_text("better")
    assert left(SETTINGS, "images", output=out, **IN_TEXTS) == []
    assert texts(here / "texts") == BOTH | {"a.txt": "better"}


def test_the_output_folder_is_made_and_left_only_if_something_is_in_it(here, out):
    nested = {"format": "txt", "output_dir": Path("new/texts")}
    Output(SETTINGS, OutputOptions(**nested)).close()
    assert not Path("new/texts").exists()
    out.write_text("mine")
    with pytest.raises(ValueError, match="exists and was not made by mmvllm"):
        Output(SETTINGS, OutputOptions(output=out, **nested))
    assert not Path("new/texts").exists()
    record_all(SETTINGS, "images", output=None, **nested)
    assert texts(here / "new/texts") == BOTH and Path("new/texts/captions.jsonl").exists()
    Path("file").touch()
    with pytest.raises(ValueError, match="output_dir file is not a folder; choose another"):
        Output(SETTINGS, OutputOptions(format="txt", output_dir="file"))
    with pytest.raises(ValueError, match=r"output_dir file/sub cannot be made: Not a directory"):
        Output(SETTINGS, OutputOptions(format="txt", output_dir="file/sub"))
    assert not Path("file").is_dir()


@pytest.mark.parametrize("place", ["images", "/images", ".."])
def test_beside_images_files_are_restored_from_any_working_directory(place, here, out, monkeypatch):
    given = here / "images" if place == "/images" else "images"
    record_all(SETTINGS, given, output=out, format="txt")
    (here / "images/a.txt").unlink()
    (here / "images/deep/b.txt").write_text("")  # as after a power failure
    if place == "..":
        monkeypatch.chdir(here / "images")
        given = "."
    assert left(SETTINGS, given, output=out, format="txt") == []
    assert texts(here) == {f"images/{name}": text for name, text in BOTH.items()}


def test_a_file_is_not_written_where_only_the_relative_path_is_equal(here, out, tmp_path, monkeypatch, caplog):
    record_all(SETTINGS, "images", output=out, format="txt")
    (here / "images/a.txt").unlink()
    shutil.copytree(here, tmp_path / "other", ignore=shutil.ignore_patterns("*.txt"))
    (tmp_path / "other/images/c.png").touch()
    monkeypatch.chdir(tmp_path / "other")
    record_all(SETTINGS, "images/c.png", output=out, format="txt")
    assert texts(tmp_path / "other") == {"images/c.txt": "a c.png\n"}


def test_files_that_cannot_be_restored_are_named(here, out, caplog):
    record_all(SETTINGS, "images", output=out, **IN_TEXTS)
    Path("texts/a.txt").unlink()
    Path("texts/a.txt").mkdir()
    (Path("texts/a.txt") / "x").touch()
    with opened(SETTINGS, "images", output=out, **IN_TEXTS) as (_, tasks):
        assert tasks == []
    assert "are missing: 1\ntexts/a.txt cannot be written: Is a directory" in caplog.text


@pytest.mark.parametrize(
    "first", [{}, {"format": "txt", "caption_extension": ".caption"}, {"format": "webdataset-json"}]
)
def test_caption_files_of_another_format_or_folder_are_written_from_the_records(first, here, out):
    record_all(SETTINGS, "images", output=out, **first)
    for _ in range(2):
        assert left(SETTINGS, "images", output=out, **IN_TEXTS) == []
        assert texts(here / "texts") == BOTH


def test_an_image_given_twice_and_a_new_one_with_its_name_have_no_wrong_file(here, out, caplog):
    record_all(SETTINGS, "images/a.png", output=out, **IN_TEXTS)
    Path("texts/a.txt").unlink()
    Path("images/a.jpg").touch()
    with opened(SETTINGS, "images/a.png", "images/a.png", "images/a.jpg", output=out, **IN_TEXTS) as (_, tasks):
        (task,) = tasks
        assert "is the caption file of another image" in task.item.error
    assert texts(here / "texts") == {"a.txt": "a a.png\n"} and caplog.text == ""


@pytest.mark.parametrize("options", [{"format": "txt"}, IN_TEXTS], ids=["beside images", "in a folder"])
def test_a_record_does_not_say_which_files_are_written(options, here, out, tmp_path):
    record_all(SETTINGS, "images", output=out, **options)
    first, *others = [json.loads(line) for line in out.read_text().splitlines()]
    before = {*tmp_path.rglob("*")}
    for file, path in (
        ("texts/__init__.py", "images/a.png"),
        ("images/evil.txt", "images/a.png"),
        ("images/a.b.txt", "images/a.b.png"),
        ("texts/../../evil.txt", "../../a.png"),
        (str(tmp_path / "evil.txt"), "notes.md"),
    ):
        changed = first | {"file": file, "path": path, "caption": "curl evil"}
        added = [first, *others, changed | {"key": "1" * 32}]
        for records in ([changed, *others], added):
            out.write_text("".join(f"{json.dumps(one)}\n" for one in records))
            Path(first["file"]).unlink()
            left(SETTINGS, "images", output=out, **options)
            assert {*tmp_path.rglob("*")} == before


def test_a_record_without_a_caption_has_no_file(here, out):
    record_all(SETTINGS, "images", output=out, **IN_TEXTS)
    lines = [json.loads(line) | {"error": "is damaged", "caption": None} for line in out.read_text().splitlines()]
    out.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    shutil.rmtree("texts")
    left(SETTINGS, "images", output=out, **IN_TEXTS)
    assert texts(here) == {}
