"""Which images are found, in which order, what they are called, and how little is read to find them."""

import io
import json
import os
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from PIL import Image

from mmvllm.captioning import tars
from mmvllm.captioning import walk as walk_module
from mmvllm.captioning.find import find_items
from mmvllm.captioning.items import Item
from mmvllm.captioning.names import SUFFIXES
from mmvllm.captioning.tars import TarMember, tar_members
from mmvllm.processors.load import load_image
from tests.helpers.requests import noise_image


def put(folder: Path, *names: str) -> Path:
    """Make empty files, and the folders they need."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def relatives(*paths: object) -> list[str]:
    """What is found without an error, by its place in an output folder."""
    found = list(find_items(list(map(str, paths))))
    assert [item.error for item in found] == [None] * len(found)
    return [item.relative for item in found]


def errors(*paths: object) -> dict[str, str | None]:
    return {item.path: item.error for item in find_items(list(map(str, paths)))}


@pytest.fixture
def open_folders(monkeypatch):
    """Folders that are being read; and for each the entries that were taken, in the order of their opening."""
    scandir, is_open, taken = os.scandir, set(), []

    class Counted:
        def __init__(self, path):
            self.path, self.entries, self.number = path, scandir(path), len(taken)
            taken.append(0)
            is_open.add(path)

        def __iter__(self):
            return self

        def __next__(self):
            entry = next(self.entries)
            taken[self.number] += 1
            return entry

        def close(self):
            self.entries.close()
            is_open.discard(self.path)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.close()

    monkeypatch.setattr(walk_module.os, "scandir", Counted)
    return is_open, taken


# Folders


def test_a_folder_comes_sorted_files_and_folders_together(tmp_path):
    names = ["a.JPG", "b.png", "deep/a.bmp", "deep/er/c.webp", "with space.gif"]
    folder = put(tmp_path / "images", *reversed(names), "notes.txt", "list.jsonl", "deep/Thumbs.db", "jpg", "x.tar.gz")
    (folder / "deep" / "folder.png").mkdir()
    found = list(find_items([folder]))
    assert [item.relative for item in found] == names
    assert [item.path for item in found] == [item.source for item in found] == [str(folder / name) for name in names]
    assert found[0] == Item(str(folder / "a.JPG"), "a.JPG", str(folder / "a.JPG"))


def test_every_suffix_is_one_that_pillow_reads():
    Image.init()
    readable = {suffix for suffix, name in Image.registered_extensions().items() if name in Image.OPEN}
    assert SUFFIXES - readable <= {".avif", ".mpo"}  # the one Pillow may be built without, the other is opened as JPEG
    assert {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"} <= SUFFIXES


def test_hidden_files_and_folders_are_passed_over_but_not_if_named(tmp_path):
    folder = put(tmp_path, "a.png", ".b.png", ".thumbnails/c.png", "d/.e/f.png", ".hidden.tar")
    assert relatives(folder) == ["a.png"]
    assert relatives(folder / ".thumbnails", folder / ".b.png") == [".thumbnails/c.png", ".b.png"]


def test_odd_names_are_names(tmp_path):
    names = ["\n.png", " .png", "a\nb.png", "a\\b.png", 'quote".png', "é.png", "日本 🦊.png", os.fsdecode(b"\xff.png")]
    folder = put(tmp_path, *names)
    assert relatives(folder) == sorted(names)
    (named,) = find_items([os.fsencode(folder / names[-1])])
    assert named == Item(str(folder / names[-1]), names[-1], str(folder / names[-1]))


@pytest.mark.parametrize("name", ["data:", "~", "https:"])
def test_a_found_name_that_looks_like_something_else_is_loaded_as_a_file(name, tmp_path, monkeypatch):
    put(tmp_path, f"{name}/a.png")
    monkeypatch.setenv("HOME", "/no/such/home")
    monkeypatch.chdir(tmp_path)
    noise_image(60, 64).save(tmp_path / name / "a.png")
    (item,) = find_items([name])
    assert item.path == f"{name}/a.png"
    assert load_image(item.read()).size == (60, 64)


def test_several_folders_keep_their_images_apart(tmp_path, monkeypatch):
    put(tmp_path, "x/a.png", "y/a.png")
    assert relatives(tmp_path / "x", f"{tmp_path}/y/") == ["x/a.png", "y/a.png"]
    assert relatives(tmp_path / "x") == ["a.png"]
    monkeypatch.chdir(tmp_path / "x")
    assert relatives(".", "../y", "a.png") == ["x/a.png", "y/a.png", "a.png"]
    assert relatives("..", "../y/..") == [f"{tmp_path.name}/{name}/a.png" for name in "xyxy"]
    assert [item.path for item in find_items(["."])] == ["./a.png"]


def test_a_folder_named_twice_comes_twice(tmp_path):
    put(tmp_path, "x/a.png")
    assert relatives(tmp_path / "x", tmp_path / "x") == ["x/a.png", "x/a.png"]


def test_a_folder_without_images_gives_nothing(tmp_path):
    assert relatives(put(tmp_path, "notes.txt", "deep/er/README")) == []


def test_a_folder_that_cannot_be_listed_is_an_error_and_the_walk_goes_on(tmp_path, monkeypatch):
    put(tmp_path, "a.png", "closed/b.png", "open/c.png")
    scandir = os.scandir

    def refuse(path):
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied")  # root may list anything
        return scandir(path)

    monkeypatch.setattr(walk_module.os, "scandir", refuse)
    found = list(find_items([tmp_path]))
    closed = str(tmp_path / "closed")
    assert [item.relative for item in found] == ["a.png", "closed", "open/c.png"]
    assert found[1] == Item(closed, "closed", None, error="folder cannot be read (Permission denied)")
    with pytest.raises(ValueError, match=r"folder cannot be read \(Permission denied\)"):
        found[1].read()
    assert [item.relative for item in find_items([closed])] == ["closed"]


def test_what_comes_and_goes_during_the_walk_does_not_end_it(tmp_path):
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


def test_a_folder_that_breaks_off_while_it_is_read_is_an_error(tmp_path, monkeypatch, open_folders):
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
    """A folder with an image so far down that whatever recurses gives up, pytest's own cleaning too; and how far."""
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


def test_images_come_at_any_depth(deep_folder):
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
def test_links_upwards_are_not_followed(target, tmp_path):
    put(tmp_path, "top/a.png", "top/deep/b.png")
    (tmp_path / "top" / "deep" / "up").symlink_to(target)
    assert relatives(tmp_path / "top") == ["a.png", "deep/b.png"]
    assert relatives(f"{tmp_path}/top/**/*.png") == ["a.png", "deep/b.png"]


def test_links_to_each_other_end(tmp_path):
    put(tmp_path, "x/a.png", "y/b.png")
    (tmp_path / "x" / "to-y").symlink_to("../y")
    (tmp_path / "y" / "to-x").symlink_to("../x")
    want = ["x/a.png", "x/to-y/b.png", "y/b.png", "y/to-x/a.png"]
    assert relatives(tmp_path) == want
    assert relatives(f"{tmp_path}/**") == want


def test_many_links_to_each_other_end(tmp_path):
    """Each of 12 folders leads to all others: there are some 10^9 ways through them."""
    for i in range(12):
        put(tmp_path, f"{i}/{i}.png")
        for j in range(12):
            (tmp_path / str(i) / f"to-{j}").symlink_to(f"../{j}")
    found = relatives(tmp_path)
    assert {name.rpartition("/")[2] for name in found} == {f"{i}.png" for i in range(12)}
    assert len(found) <= 24  # each by itself and once by a link


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


# Lazily


def test_the_first_image_comes_before_a_large_folder_is_listed(tmp_path, monkeypatch, open_folders):
    monkeypatch.setattr(walk_module, "CHUNK", 10)
    put(tmp_path, *(f"{i:03}.png" for i in range(100)))
    walk = find_items([tmp_path])
    first = [item.relative for item in islice(walk, 10)]
    assert open_folders[1] == [10]
    assert first == sorted(first)
    assert sorted(first + [item.relative for item in walk]) == [f"{i:03}.png" for i in range(100)]


@pytest.mark.parametrize("count", [9, 10, 11, 20])
def test_nothing_is_lost_where_chunks_meet(count, tmp_path, monkeypatch):
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


def test_nothing_is_looked_for_before_the_first_is_asked_for(tmp_path, open_folders):
    find_items([tmp_path, f"{tmp_path}/*.png"])
    assert open_folders[1] == []


# Patterns


@pytest.fixture
def album(tmp_path, monkeypatch) -> Path:
    put(
        tmp_path, "a.png", "b.jpg", "notes.txt", "2019/a.png", "2019/May/c.png", "2020/a.png", ".git/a.png", "[x]/d.png"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "want"),
    [
        ("*.png", ["a.png"]),
        ("?.*", ["a.png", "b.jpg"]),
        ("[ab].png", ["a.png"]),
        ("20*", ["2019/May/c.png", "2019/a.png", "2020/a.png"]),
        ("20*/", ["2019/May/c.png", "2019/a.png", "2020/a.png"]),
        ("*/", ["2019/May/c.png", "2019/a.png", "2020/a.png", "[x]/d.png"]),
        ("*/a.png", ["2019/a.png", "2020/a.png"]),
        ("20[12][0-8]/*", ["2020/a.png"]),
        ("2019/**", ["May/c.png", "a.png"]),
        ("2019/**/", ["May/c.png", "a.png"]),
        ("2019/*/**", ["May/c.png"]),
        ("*/**", ["2019/May/c.png", "2019/a.png", "2020/a.png", "[x]/d.png"]),
        ("2019/**/c.png", ["May/c.png"]),
        ("**/May", ["2019/May/c.png"]),
        ("**/May/**/*.png", ["2019/May/c.png"]),
        ("**/**/a.png", ["2019/a.png", "2020/a.png", "a.png"]),
        ("**", ["2019/May/c.png", "2019/a.png", "2020/a.png", "[x]/d.png", "a.png", "b.jpg"]),
        (".g*/a.png", [".git/a.png"]),
        ("[[]x]/*", ["[x]/d.png"]),
        ("*.txt", []),
    ],
)
def test_what_matches_a_pattern_is_taken_as_in_a_folder(pattern, want, album):
    assert relatives(pattern) == want
    # Given in full, the names are those within the part that is no pattern.
    assert relatives(f"{album}/{pattern}") == want


@pytest.mark.parametrize("pattern", ["*.gif", "*/b.jpg", "none/*", "none/**", "a.png/*", "**/[y]"])
def test_a_pattern_that_nothing_matches_is_an_error(pattern, album):
    (item,) = find_items([pattern])
    assert (item.path, item.source, item.error) == (pattern, None, "nothing matches this pattern")


def test_paths_that_a_pattern_finds_are_as_they_were_written(album):
    assert [item.path for item in find_items(["2*/a.png", f"{album}/2*/a.png"])] == [
        "2019/a.png",
        "2020/a.png",
        f"{album}/2019/a.png",
        f"{album}/2020/a.png",
    ]


def test_what_exists_is_no_pattern(album):
    put(album, "a[1].png", "what?", "*/x.png")
    assert relatives("a[1].png", "what?", "*") == ["a[1].png", "what?", "*/x.png"]
    assert relatives("[x]") == ["d.png"]


def test_a_pattern_looks_only_into_folders_that_may_hold_a_match(album, open_folders):
    assert relatives("*/May/*.png") == ["2019/May/c.png"]
    assert len(open_folders[1]) == 5  # the album, three folders and May


# Tars


def make_tar(path: Path, members: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return path


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_tar_gives_its_images(format, tmp_path):
    members = {
        "b.PNG": b"1" * 700,
        "b.json": b"{}",
        "a/c.jpg": b"22",
        "./d.webp": b"333",
        ".e.png": b"hidden",
        "a/._c.jpg": b"hidden",
        ".cache/f.png": b"hidden",
        "long " * 50 + "é.png": b"4444",
        os.fsdecode(b"\xff.png"): b"",
    }
    tar = make_tar(tmp_path / "shard-01.tar", members, format)
    found = list(find_items([tar]))
    names = ["b.PNG", "a/c.jpg", "./d.webp", "long " * 50 + "é.png", "\udcff.png"]
    assert [item.path for item in found] == [f"{tar}/{name}" for name in names]
    assert [item.relative for item in found] == [f"shard-01/{name.removeprefix('./')}" for name in names]
    assert [item.read() for item in found] == [members[name] for name in names]
    assert dict(tar_members(tar)) == {item.path.removeprefix(f"{tar}/"): item.source for item in found}


def test_an_image_in_a_tar_loads(tmp_path):
    buffer = io.BytesIO()
    noise_image(60, 64).save(buffer, "PNG")
    (item,) = find_items([make_tar(tmp_path / "s.tar", {"a.png": buffer.getvalue()})])
    assert load_image(item.read()).size == (60, 64)


def test_of_a_tar_folders_and_devices_are_passed_over(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.REGTYPE):
            header = tarfile.TarInfo(f"{kind.decode()}.png")
            header.type, header.linkname = kind, "0.png"
            tar.addfile(header)
    assert relatives(tmp_path / "s.tar") == ["s/0.png"]


def test_members_stay_below_the_output_folder(tmp_path):
    names = ["../../x.jpg", "/etc/y.jpg", "a/../../z.jpg", "//u.jpg", "a//./v.jpg"]
    tar = make_tar(tmp_path / "s.tar", dict.fromkeys(names, b""))
    assert relatives(tar) == ["s/x.jpg", "s/etc/y.jpg", "s/a/z.jpg", "s/u.jpg", "s/a/v.jpg"]
    assert [item.path for item in find_items([tar])] == [f"{tar}/{name}" for name in names]


def test_tars_in_folders_and_patterns_are_walked(tmp_path):
    put(tmp_path, "deep/a.png", "deep/z.png", "folder.tar/b.png")
    make_tar(tmp_path / "deep" / "s.TAR", {"c.png": b""})
    want = ["deep/a.png", "deep/s/c.png", "deep/z.png", "folder.tar/b.png"]
    assert relatives(tmp_path) == want
    assert relatives(f"{tmp_path}/deep/*.TAR") == ["s/c.png"]


def test_headers_of_a_tar_are_read_as_images_are_asked_for(tmp_path, monkeypatch):
    tar = make_tar(tmp_path / "s.tar", {f"{i}.png": b"" for i in range(100)})
    read, count = tarfile.TarFile.next, [0]

    def next_counted(self):
        count[0] += 1
        assert len(self.members) <= 1
        return read(self)

    monkeypatch.setattr(tarfile.TarFile, "next", next_counted)
    members = tar_members(tar)
    assert next(members)[0] == "0.png"
    assert count[0] <= 2
    assert len(list(members)) == 99


def test_members_are_read_by_many_threads_at_once(tmp_path):
    data = {f"{i}.png": bytes([i]) * (5000 + i) for i in range(64)}
    found = dict(tar_members(make_tar(tmp_path / "s.tar", data)))
    together = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda member: (together.wait(), member.read())[1], found.values()))
    assert dict(zip(found, read, strict=True)) == data


def test_closing_the_search_closes_the_tar(tmp_path):
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"", "b.png": b""})
    walk = find_items([tmp_path])
    next(walk)
    assert tar in open_files()
    walk.close()
    assert tar not in open_files()


def open_files() -> list[Path]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # another thread's, closed meanwhile
            found.append((Path("/proc/self/fd") / name).readlink())
    return found


@pytest.mark.parametrize("size", [1300, 1536, 1536 + 100, 1536 + 599])
def test_a_truncated_tar_gives_what_is_whole_and_an_error(size, tmp_path):
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"1" * 512, "b.png": b"2" * 600}, tarfile.USTAR_FORMAT)
    os.truncate(tar, size)
    *whole, last = find_items([tar])
    assert [(item.relative, item.read()) for item in whole] == [("s/a.png", b"1" * 512)]
    assert (last.path, last.relative, last.source) == (str(tar), "s.tar", None)
    assert last.error.startswith("the tar is damaged or truncated (")


def test_a_damaged_header_does_not_pass_for_the_end(tmp_path):
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"1" * 512, "b.png": b"2" * 600}, tarfile.USTAR_FORMAT)
    data = bytearray(tar.read_bytes())
    data[1024 + 5] ^= 1
    tar.write_bytes(data)
    first, last = find_items([tar])
    assert first.relative == "s/a.png"
    assert last.error == "the tar is damaged or truncated (no member begins at byte 1024)"


def test_a_negative_size_does_not_lead_round_in_circles(tmp_path):
    header = tarfile.TarInfo("a.png")
    header.size = -512
    data = header.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "s.tar").write_bytes(make_tar(tmp_path / "s.tar", {"b.png": b""}).read_bytes()[:512] + data * 3)
    found = list(islice(find_items([tmp_path / "s.tar"]), 10))
    assert [item.error is None for item in found] == [True, False]


def test_a_tar_without_members_or_end_mark_is_whole(tmp_path):
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"1"}, tarfile.USTAR_FORMAT)
    os.truncate(tar, 1024)
    assert relatives(tar) == ["s/a.png"]
    assert relatives(make_tar(tmp_path / "none.tar", {})) == []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("s.tar", None, "cannot be read (No such file or directory)"),
        ("s.tar", b"", "the tar is damaged or truncated (empty file)"),
        ("s.tar", b"Dear Sir or Madam", "the tar is damaged or truncated ("),
        (
            "s.tar",
            b"\x1f\x8b\x08 and so on",
            "is compressed, images cannot be reached by seeking; decompress it first",
        ),
        ("s.tar.gz", b"what not", "is compressed, "),
        ("s.TGZ", b"what not", "is compressed, "),
        ("s.tar.zst", b"what not", "is compressed, "),
    ],
)
def test_a_tar_that_cannot_be_read_is_an_error(name, data, message, tmp_path):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    (item,) = find_items([tmp_path / name])
    assert (item.path, item.relative, item.source) == (str(tmp_path / name), name, None)
    assert item.error.startswith(message)


def test_a_pipe_named_like_a_tar_does_not_stop_the_walk(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    put(tmp_path, "b.png")
    assert list(errors(tmp_path).values()) == ["cannot be read (it is a folder, a device or a pipe)", None]


def test_a_member_that_is_not_there_any_more_is_named(tmp_path, monkeypatch):
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"1" * 700})
    ((_, member),) = tar_members(tar)
    monkeypatch.setattr(tars, "MAX_FILE_BYTES", 699)
    with pytest.raises(ValueError, match=r"s\.tar: the image in it has 700 bytes, more than 699; shrink it first"):
        member.read()
    monkeypatch.setattr(tars, "MAX_FILE_BYTES", 700)
    assert member.read() == b"1" * 700
    os.truncate(tar, member.offset + 600)
    with pytest.raises(ValueError, match=r"s\.tar: ends 100 bytes before the image in it does"):
        member.read()
    tar.unlink()
    with pytest.raises(ValueError, match=r"s\.tar: cannot be read \(No such file or directory\)"):
        member.read()


# Lists

DATA = "data:image/png;base64,iVBORw0K"


@pytest.mark.parametrize("name", ["list.txt", "list.LST"])
def test_a_text_list_has_a_name_per_line(name, tmp_path, monkeypatch):
    put(tmp_path, "lists/near.png", "far.png", "lists/deep/a.png", "outside.png")
    monkeypatch.chdir(tmp_path)
    lines = ["near.png", "far.png", "", "deep/a.png", " \t", "../outside.png", "/abs/b.png", "https://x.org/c/d.jpg?e"]
    lines += [" spaces .png ", "# no comment", DATA, "deep", "*.png"]
    (tmp_path / "lists" / name).write_text("\n".join(lines))
    found = [(item.path, item.relative, item.source) for item in find_items([f"lists/{name}"])]
    assert found == [
        ("lists/near.png", "near.png", "lists/near.png"),
        ("far.png", "far.png", "far.png"),
        ("lists/deep/a.png", "deep/a.png", "lists/deep/a.png"),
        ("lists/../outside.png", "outside.png", "lists/../outside.png"),
        ("/abs/b.png", "abs/b.png", "/abs/b.png"),
        ("https://x.org/c/d.jpg?e", "x.org/c/d.jpg", "https://x.org/c/d.jpg?e"),
        (" spaces .png ", " spaces .png ", " spaces .png "),
        ("# no comment", "# no comment", "# no comment"),
        (f"lists/{name}:11", "list-11", DATA),
        ("lists/deep", "deep", "lists/deep"),
        ("*.png", "*.png", "*.png"),
    ]


def test_lists_of_other_systems_are_read(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfa.png\r\nb\xff.png\r\n\r\n\xef\xbb\xbfc.png")
    assert relatives(tmp_path / "list.txt") == ["a.png", "b\udcff.png", "\ufeffc.png"]
    (tmp_path / "list.jsonl").write_bytes(b'\xef\xbb\xbf{"image": "a.png"}\r\n\r\n{"image": "b.png"}')
    assert relatives(tmp_path / "list.jsonl") == ["a.png", "b.png"]


@pytest.fixture
def stdin():
    """The end of a pipe whose other end is standard input."""
    before, (end, start) = os.dup(0), os.pipe()
    os.dup2(end, 0)
    os.close(end)
    with open(start, "wb", buffering=0) as pipe:
        yield pipe
    os.dup2(before, 0)
    os.close(before)


def test_standard_input_is_a_text_list(stdin):
    stdin.write(f"a.png\n{DATA}\n".encode())
    found = find_items(["-"])
    assert next(found) == Item("a.png", "a.png", "a.png")  # while more may come
    stdin.close()
    assert list(found) == [Item("-:2", "stdin-2", DATA)]
    os.fstat(0)  # it is still open


def test_lines_are_taken_as_they_are_written(tmp_path):
    os.mkfifo(tmp_path / "list.txt")
    can_go_on = threading.Event()

    def write():
        with open(tmp_path / "list.txt", "wb", buffering=0) as pipe:
            for i in range(1000):
                pipe.write(b"%d.png\n" % i)
                assert can_go_on.wait(10)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    found = find_items([tmp_path / "list.txt"])
    assert next(found).relative == "0.png"  # nothing else is written yet
    can_go_on.set()
    assert len(list(found)) == 999
    writer.join()


def test_an_endless_list_is_read_line_by_line(tmp_path):
    os.mkfifo(tmp_path / "list.txt")

    def write():
        with suppress(BrokenPipeError), open(tmp_path / "list.txt", "wb") as pipe:
            while True:
                pipe.write(b"image.png\n" * 1000)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    found = find_items([tmp_path / "list.txt"])
    assert {item.relative for item in islice(found, 5000)} == {"image.png"}
    found.close()
    writer.join()


def test_a_jsonl_list_may_have_prompts_contexts_and_ids(tmp_path):
    put(tmp_path, "deep/a.png")
    lines = [
        {"image": "deep/a.png", "prompt": "What?", "context": "At sea.", "id": "one", "width": 7},
        {"image": "https://x.org/b.png", "id": 2},
        {"image": DATA, "id": 0, "prompt": "", "context": None},
        {"image": "\udcff.png", "id": None},
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    near = str(tmp_path / "deep/a.png")
    assert list(find_items([tmp_path / "list.jsonl"])) == [
        Item(near, "deep/a.png", near, "one", "What?", "At sea."),
        Item("https://x.org/b.png", "x.org/b.png", "https://x.org/b.png", "2"),
        Item(f"{tmp_path}/list.jsonl:3", "list-3", DATA, "0", ""),
        Item("\udcff.png", "\udcff.png", "\udcff.png"),
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"image": "a.png"', "is not valid JSON (Expecting ',' delimiter)"),
        ("a.png", "is not valid JSON (Expecting value)"),
        (b'{"image": "\xff.png"}', "is not valid JSON ('utf-8' codec can't decode byte 0xff in position 11: "),
        ("[" * 100_000, "is not valid JSON (maximum recursion depth exceeded"),
        ('{"image": "a.png", "id": ' + "9" * 10_000 + "}", "is not valid JSON (Exceeds the limit"),
        ("7", 'is not an object; write {"image": PATH}'),
        ('["a.png"]', 'is not an object; write {"image": PATH}'),
        ('{"path": "a.png"}', 'has no "image"; give a path, a URL or a data URI'),
        ('{"image": null}', 'has no "image"; '),
        ('{"image": ""}', 'has no "image"; '),
        ('{"image": ["a.png"]}', '"image" is ["a.png"], it must be a string'),
        ('{"image": 0}', '"image" is 0, it must be a string'),
        ('{"image": "a.png", "prompt": 5}', '"prompt" is 5, it must be a string'),
        ('{"image": "a.png", "context": {}}', '"context" is {}, it must be a string'),
        ('{"image": "a.png", "id": 1.5}', '"id" is 1.5, it must be a string or an integer'),
        ('{"image": "a.png", "id": true}', '"id" is true, it must be a string or an integer'),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_malformed_line_is_an_error_and_the_rest_goes_on(line, error, tmp_path):
    text = line.encode() if isinstance(line, str) else line
    (tmp_path / "list.jsonl").write_bytes(b'{"image": "a.png"}\n\n' + text + b'\n{"image": "b.png"}\n')
    first, malformed, last = find_items([tmp_path / "list.jsonl"])
    assert (first.source, last.source) == ("a.png", "b.png")
    assert malformed.error.startswith(error)
    path = f"{tmp_path}/list.jsonl:3"
    assert malformed == Item(path, "list-3", None, error=malformed.error)


def test_a_malformed_line_keeps_its_id(tmp_path):
    (tmp_path / "list.jsonl").write_text('{"id": 12}')
    (item,) = find_items([tmp_path / "list.jsonl"])
    assert item.id == "12" and item.error.startswith("has no")


@pytest.mark.parametrize("name", ["none.txt", "none.lst", "none.jsonl"])
def test_a_list_that_cannot_be_read_is_refused_at_once(name, tmp_path):
    with pytest.raises(ValueError, match=rf"{name}: the list cannot be read \(No such file or directory\)"):
        find_items([put(tmp_path, "a.png"), tmp_path / name])


# Files and URLs


@pytest.mark.parametrize(
    ("path", "relative"),
    [
        ("a.png", "a.png"),
        ("~/a.png", "a.png"),
        ("s3://bucket/a.png", "a.png"),
        ("https://x.org/a/b.png?size=1&name=c.gif", "x.org/a/b.png"),
        ("HTTP://user:word@x.org:8080/a.png#top", "x.org/a.png"),
        ("https://x.org", "x.org/index"),
        ("https://x.org/?q=1", "x.org/index"),
        ("https://x.org/../..//a/./b.png", "x.org/a/b.png"),
        ("https://../a.png", "a.png"),
        ("http:///a.png", "a.png"),
        ("http://[::1]:80/a.png", "[::1]/a.png"),
        ("http://[::1/a.png", "[/a.png"),
        ("http://x.org/what*[is]?.png", "x.org/what*[is]"),
        ("a\0b.png", "ab.png"),
    ],
)
def test_all_else_is_a_file_or_url_that_may_or_may_not_load(path, relative, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(find_items([path])) == [Item(path, relative, path)]


@pytest.mark.parametrize("path", ["no/such/a.weird", "../a", "no/..", ""])
def test_a_path_that_is_nothing_is_refused_at_once(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no such file or folder"):
        find_items([path])


def test_given_files_come_in_their_order_whatever_their_suffix(tmp_path):
    put(tmp_path, "b.png", "a.bin")
    assert relatives(tmp_path / "b.png", tmp_path / "a.bin", tmp_path / "b.png") == ["b.png", "a.bin", "b.png"]


def test_an_item_reads_what_is_to_be_loaded(tmp_path):
    (tmp_path / "s.tar").write_bytes(b"..content")
    assert Item("x", "x", "a.png").read() == "a.png"
    assert Item("x", "x", TarMember(str(tmp_path / "s.tar"), 2, 7)).read() == b"content"


def test_links_in_a_tar_are_errors_of_their_own(tmp_path):
    put(tmp_path, "a.png")
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(tmp_path / "a.png", "a.png")
        for name, kind in (("hard.png", tarfile.LNKTYPE), ("soft.png", tarfile.SYMTYPE)):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, "a.png"
            tar.addfile(link)
    found = {item.relative: item.error for item in find_items([tmp_path / "shard.tar"])}
    assert found["shard/a.png"] is None
    assert all("is a link" in found[f"shard/{name}.png"] for name in ("hard", "soft"))
