"""The images that are found in folders and through links, their order, and how much is read to find them."""

import os
from itertools import islice

import pytest
from PIL import Image

from mmvllm.captioning.sources import walk as walk_module
from mmvllm.captioning.sources.find import find_items
from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.names import SUFFIXES
from mmvllm.processors.images.decode import readable_formats
from mmvllm.processors.images.load import load_image
from tests.helpers.captioning.finding import errors, put, relatives
from tests.helpers.engine.requests import noise_image


def test_files_and_folders_are_sorted_together(tmp_path):
    names = ["a.JPG", "b.png", "deep/a.bmp", "deep/er/c.webp", "with space.gif"]
    folder = put(tmp_path / "images", *reversed(names), "notes.txt", "list.jsonl", "deep/Thumbs.db", "jpg", "x.tar.gz")
    (folder / "deep" / "folder.png").mkdir()
    found = list(find_items([folder]))
    assert [item.relative for item in found] == names
    assert [item.path for item in found] == [item.source for item in found] == [str(folder / name) for name in names]
    assert found[0] == Item(str(folder / "a.JPG"), "a.JPG", str(folder / "a.JPG"))


def test_every_suffix_is_one_that_pillow_reads():
    readable_formats()  # registers HEIF
    readable = {suffix for suffix, name in Image.registered_extensions().items() if name in Image.OPEN}
    assert SUFFIXES - readable <= {".avif", ".mpo"}  # Pillow may be built without AVIF, and it opens MPO as JPEG
    assert {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"} <= SUFFIXES


def test_hidden_files_and_folders_are_skipped_unless_named(tmp_path):
    folder = put(tmp_path, "a.png", ".b.png", ".thumbnails/c.png", "d/.e/f.png", ".hidden.tar")
    assert relatives(folder) == ["a.png"]
    assert relatives(folder / ".thumbnails", folder / ".b.png") == [".thumbnails/c.png", ".b.png"]


def test_file_names_may_have_any_characters(tmp_path):
    names = ["\n.png", " .png", "a\nb.png", "a\\b.png", 'quote".png', "é.png", "日本 🦊.png", os.fsdecode(b"\xff.png")]
    folder = put(tmp_path, *names)
    assert relatives(folder) == sorted(names)
    (named,) = find_items([os.fsencode(folder / names[-1])])
    assert named == Item(str(folder / names[-1]), names[-1], str(folder / names[-1]))


@pytest.mark.parametrize("name", ["data:", "~", "https:"])
def test_a_found_name_that_looks_like_a_url_is_loaded_as_a_file(name, tmp_path, monkeypatch):
    put(tmp_path, f"{name}/a.png")
    monkeypatch.setenv("HOME", "/no/such/home")
    monkeypatch.chdir(tmp_path)
    noise_image(60, 64).save(tmp_path / name / "a.png")
    (item,) = find_items([name])
    assert item.path == f"{name}/a.png"
    assert load_image(item.read()).size == (60, 64)


def test_relative_paths_in_several_folders_are_distinct(tmp_path, monkeypatch):
    put(tmp_path, "x/a.png", "y/a.png")
    assert relatives(tmp_path / "x", f"{tmp_path}/y/") == ["x/a.png", "y/a.png"]
    assert relatives(tmp_path / "x") == ["a.png"]
    monkeypatch.chdir(tmp_path / "x")
    assert relatives(".", "../y", "a.png") == ["x/a.png", "y/a.png", "a.png"]
    assert relatives("..", "../y/..") == [f"{tmp_path.name}/{name}/a.png" for name in "xyxy"]
    assert [item.path for item in find_items(["."])] == ["./a.png"]


def test_a_folder_that_cannot_be_listed_is_an_error_and_the_walk_continues(tmp_path, monkeypatch):
    put(tmp_path, "a.png", "closed/b.png", "open/c.png")
    scandir = os.scandir

    def refuse(path):
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied")  # simulated, because root may list any folder
        return scandir(path)

    monkeypatch.setattr(walk_module.os, "scandir", refuse)
    found = list(find_items([tmp_path]))
    closed = str(tmp_path / "closed")
    assert [item.relative for item in found] == ["a.png", "closed", "open/c.png"]
    assert found[1] == Item(closed, "closed", None, error="folder cannot be read (Permission denied)")
    with pytest.raises(ValueError, match=r"folder cannot be read \(Permission denied\)"):
        found[1].read()
    assert [item.relative for item in find_items([closed])] == ["closed"]


def test_changes_to_a_folder_do_not_end_the_walk(tmp_path):
    put(tmp_path, "a.png", "b/gone.png", "c.png", "d/e.png")
    walk = find_items([tmp_path])
    assert next(walk).relative == "a.png"
    (tmp_path / "b" / "gone.png").unlink()
    (tmp_path / "b").rmdir()
    (tmp_path / "c.png").unlink()
    put(tmp_path, "d/new.png")
    gone, *rest = walk
    assert (gone.relative, gone.error) == ("b", "folder cannot be read (No such file or directory)")
    assert [item.relative for item in rest] == ["c.png", "d/e.png", "d/new.png"]


def test_an_error_while_a_folder_is_read_is_an_item(tmp_path, monkeypatch, open_folders):
    put(tmp_path, "a/b.png", "c.png")
    counted = os.scandir

    class Broken(counted):
        def __next__(self):
            if self.path.endswith("a"):
                raise OSError(5, "Input/output error")
            return super().__next__()

    monkeypatch.setattr(walk_module.os, "scandir", Broken)
    assert list(errors(tmp_path).values()) == ["folder cannot be read (Input/output error)", None]
    assert not open_folders[0]


@pytest.fixture
def deep_folder(tmp_path):
    """A folder with an image below the recursion limit, also of pytest's cleanup, and the number of levels."""
    levels = 1100
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=folder)
        folder = _change(folder, "d")
    os.close(os.open("a.png", os.O_CREAT, dir_fd=folder))
    yield tmp_path, levels
    os.unlink("a.png", dir_fd=folder)
    for _ in range(levels):
        folder = _change(folder, "..")
        os.rmdir("d", dir_fd=folder)
    os.close(folder)


def _change(folder: int, name: str) -> int:
    changed = os.open(name, os.O_RDONLY, dir_fd=folder)
    os.close(folder)
    return changed


@pytest.mark.slow
def test_images_are_found_at_any_depth(deep_folder):
    folder, levels = deep_folder
    assert relatives(folder) == ["d/" * levels + "a.png"]
    assert relatives(f"{folder}/**/*.png") == ["d/" * levels + "a.png"]


# Links


def test_links_to_files_and_folders_are_followed(tmp_path):
    put(tmp_path, "away/a.png", "here/own.png")
    (tmp_path / "here" / "b.png").symlink_to(tmp_path / "away" / "a.png")
    (tmp_path / "here" / "c").symlink_to(tmp_path / "away")
    (tmp_path / "link").symlink_to(tmp_path / "here")
    assert relatives(tmp_path / "here") == ["b.png", "c/a.png", "own.png"]
    assert relatives(tmp_path / "link") == ["b.png", "c/a.png", "own.png"]


def test_a_broken_link_is_an_image_that_fails_to_load(tmp_path):
    (tmp_path / "a.png").symlink_to("nowhere")
    (tmp_path / "b.png").symlink_to("b.png")
    (tmp_path / "c").symlink_to("nowhere")
    assert relatives(tmp_path) == ["a.png", "b.png"]


@pytest.mark.parametrize("target", [".", "..", "../..", "../../.."])
def test_links_to_folders_above_are_not_followed(target, tmp_path):
    put(tmp_path, "top/a.png", "top/deep/b.png")
    (tmp_path / "top" / "deep" / "up").symlink_to(target)
    assert relatives(tmp_path / "top") == ["a.png", "deep/b.png"]
    assert relatives(f"{tmp_path}/top/**/*.png") == ["a.png", "deep/b.png"]


def test_a_cycle_of_links_ends(tmp_path):
    put(tmp_path, "x/a.png", "y/b.png")
    (tmp_path / "x" / "to-y").symlink_to("../y")
    (tmp_path / "y" / "to-x").symlink_to("../x")
    want = ["x/a.png", "x/to-y/b.png", "y/b.png", "y/to-x/a.png"]
    assert relatives(tmp_path) == want
    assert relatives(f"{tmp_path}/**") == want


def test_many_cycles_of_links_end(tmp_path):
    """Each of 12 folders links to all others, which gives about 10^9 paths."""
    for i in range(12):
        put(tmp_path, f"{i}/{i}.png")
        for j in range(12):
            (tmp_path / str(i) / f"to-{j}").symlink_to(f"../{j}")
    found = relatives(tmp_path)
    assert {name.rpartition("/")[2] for name in found} == {f"{i}.png" for i in range(12)}
    assert len(found) <= 24  # each as a folder and once through a link


def test_links_lead_to_the_same_folder_only_once_per_call(tmp_path):
    put(tmp_path, "away/a.png", "x/own.png", "y/own.png")
    for link in ("x/one", "x/two", "y/three"):
        (tmp_path / link).symlink_to(tmp_path / "away")
    assert relatives(tmp_path / "x", tmp_path / "y") == ["x/one/a.png", "x/own.png", "y/own.png"]
    assert relatives(tmp_path / "y") == ["own.png", "three/a.png"]


def test_a_folder_and_a_link_to_it_both_count(tmp_path):
    put(tmp_path, "a/x.png")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to("a")
    assert relatives(tmp_path) == ["a/x.png", "b/x.png"]


# Lazy search


def test_the_first_image_is_found_before_a_large_folder_is_listed(tmp_path, monkeypatch, open_folders):
    monkeypatch.setattr(walk_module, "CHUNK", 10)
    put(tmp_path, *(f"{i:03}.png" for i in range(100)))
    walk = find_items([tmp_path])
    first = [item.relative for item in islice(walk, 10)]
    assert open_folders[1] == [10]
    assert first == sorted(first)
    assert sorted(first + [item.relative for item in walk]) == [f"{i:03}.png" for i in range(100)]


@pytest.mark.parametrize("count", [9, 10, 11, 20])
def test_no_entry_is_lost_between_chunks(count, tmp_path, monkeypatch):
    monkeypatch.setattr(walk_module, "CHUNK", 10)
    put(tmp_path, *(f"{i}.png" for i in range(count)))
    assert sorted(relatives(tmp_path)) == sorted(f"{i}.png" for i in range(count))


def test_a_folder_is_closed_once_it_is_read(tmp_path, open_folders):
    put(tmp_path, "a.png", "b/c.png", "b/d/e.png", "f.png")
    for _ in find_items([tmp_path]):
        assert not open_folders[0]
    assert open_folders[1] == [3, 2, 1]


def test_closing_the_walk_closes_its_folders(tmp_path, monkeypatch, open_folders):
    monkeypatch.setattr(walk_module, "CHUNK", 1)
    put(tmp_path, "a/b/c.png", "a/b/d.png")
    walk = find_items([tmp_path])
    next(walk)
    assert open_folders[0] == {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")}
    walk.close()
    assert not open_folders[0]


def test_the_search_is_lazy(tmp_path, open_folders):
    find_items([tmp_path, f"{tmp_path}/*.png"])
    assert open_folders[1] == []
