"""The images in tar files, and damaged tar files."""

import io
import os
import tarfile
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from mmvllm.captioning.sources import tars
from mmvllm.captioning.sources.find import find_items
from mmvllm.captioning.sources.names import MAX_PATH
from mmvllm.captioning.sources.tars import EXTENDED, MAX_EXTENDED, MAX_VALUES, tar_members
from tests.helpers.captioning.finding import errors, make_tar, put, relatives


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


def test_folders_and_devices_in_a_tar_are_skipped(tmp_path):
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


def test_headers_of_a_tar_are_read_lazily(tmp_path, monkeypatch):
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


def test_members_are_read_by_many_threads(tmp_path):
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
        with suppress(OSError):  # closed by another thread
            found.append((Path("/proc/self/fd") / name).readlink())
    return found


@pytest.mark.parametrize("size", [1300, 1536, 1536 + 100, 1536 + 599])
def test_a_truncated_tar_gives_its_complete_members_and_an_error(size, tmp_path):
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"1" * 512, "b.png": b"2" * 600}, tarfile.USTAR_FORMAT)
    os.truncate(tar, size)
    *whole, last = find_items([tar])
    assert [(item.relative, item.read()) for item in whole] == [("s/a.png", b"1" * 512)]
    assert (last.path, last.relative, last.source) == (str(tar), "s.tar", None)
    assert last.error.startswith("the tar is damaged or truncated (")


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path):
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"1" * 512, "b.png": b"2" * 600}, tarfile.USTAR_FORMAT)
    data = bytearray(tar.read_bytes())
    data[1024 + 5] ^= 1
    tar.write_bytes(data)
    first, last = find_items([tar])
    assert first.relative == "s/a.png"
    assert last.error == "the tar is damaged or truncated (no member begins at byte 1024)"


def test_a_negative_size_does_not_cause_an_endless_loop(tmp_path):
    header = tarfile.TarInfo("a.png")
    header.size = -512
    data = header.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "s.tar").write_bytes(make_tar(tmp_path / "s.tar", {"b.png": b""}).read_bytes()[:512] + data * 3)
    found = list(islice(find_items([tmp_path / "s.tar"]), 10))
    assert [item.error is None for item in found] == [True, False]


@pytest.mark.parametrize("kind", [*EXTENDED], ids=str)
@pytest.mark.parametrize("size", [MAX_EXTENDED + 1, 3 << 30])
def test_a_header_without_end_is_not_read(kind, size, tmp_path):
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = kind, size
    tar = tmp_path / "s.tar"
    tar.write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    os.truncate(tar, size + 4096)
    tracemalloc.start()
    (item,) = find_items([tar])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert item.error == f"the tar is damaged or truncated (a header has {size} bytes, more than {MAX_EXTENDED})"
    assert most < 10_000_000


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE], ids=str)
def test_a_header_of_digits_is_not_read_for_minutes(kind, tmp_path):
    header = tarfile.TarInfo("digits")
    header.type, header.size = kind, MAX_EXTENDED
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"a"})
    tar.write_bytes(tar.read_bytes()[:1024] + header.tobuf(tarfile.GNU_FORMAT) + b"1" * MAX_EXTENDED + tar.read_bytes())
    begin = time.process_time()
    first, second = find_items([tar])
    assert time.process_time() - begin < 2  # undetected it takes 45 s
    assert first.error is None and second.error.endswith("a pax header has more than 255 digits in a row)")


@pytest.mark.parametrize(
    "header", [b"2 " * 100_000 + b"x=", b"9 path=a\n2 ", b"99 path=a\n", b"path=a\n", b"12 path.aaaa\n"], ids=len
)
def test_records_of_a_header_that_overlap_are_refused(header, tmp_path):
    """The module tarfile would keep all bytes after each record in memory."""
    member = tarfile.TarInfo("odd")
    member.type, member.size = tarfile.XHDTYPE, len(header)
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"a"})
    tar.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + header + bytes(-len(header) % 512) + tar.read_bytes())
    tracemalloc.start()
    (item,) = find_items([tar])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert item.error.endswith("a pax header has a record that is not LENGTH NAME=VALUE)") and most < 10_000_000


def test_a_name_may_have_many_digits(tmp_path):
    name = f"é-{'1234567890' * 20}.png"
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo(name))
    (item,) = find_items([tmp_path / "s.tar"])
    assert item.error is None and item.path.endswith(name)


def test_attributes_for_all_members_are_limited(tmp_path):
    values = {f"k{i}": "v" for i in range(MAX_VALUES + 1)}
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT, pax_headers=values) as tar:
        tar.addfile(tarfile.TarInfo("a.png"))
    (item,) = find_items([tmp_path / "s.tar"])
    limit = f"a member has more than {MAX_VALUES} values, with those for all members"
    assert item.error == f"the tar is damaged or truncated ({limit})"


@pytest.mark.parametrize("kinds", ["g" * 20 + "x" * 50, "x" * 50, "gx" * 20, "gxLxK" * 8])
def test_attributes_are_limited_however_many_headers_have_them(kinds, tmp_path):
    """The headers before a member are read before it is returned, and each copies the attributes for all members."""
    blocks = []
    for number, kind in enumerate(kinds):
        data = b"name\0" if kind in "LK" else b"".join(b"12 k%05x=v\n" % (number * 900 + i) for i in range(900))
        header = tarfile.TarInfo("p")
        header.type, header.size = kind.encode(), len(data)
        blocks += [header.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % tarfile.BLOCKSIZE)]
    blocks += [tarfile.TarInfo("a.png").tobuf(tarfile.USTAR_FORMAT), bytes(1024)]
    (tmp_path / "s.tar").write_bytes(b"".join(blocks))
    tracemalloc.start()
    (item,) = find_items([tmp_path / "s.tar"])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20_000_000 and (item.error is None or f"more than {MAX_VALUES} values" in item.error)
    assert (item.error is None) == ("g" not in kinds)


def test_a_name_that_no_system_has_ends_the_tar(tmp_path):
    """All members may have it, by a header of 250 kB, and each has a record."""
    name = "a" * (MAX_PATH - 4) + ".png"
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"1", name: b"2", f"b{name}": b"3", "c.png": b"4"})
    a, b, error = find_items([tar])
    assert (a.error, b.error) == (None, None) and b.path.endswith(name)
    assert (
        error.error == f"the tar is damaged or truncated (a name has {MAX_PATH + 1} characters, more than {MAX_PATH})"
    )


def test_a_name_ends_at_a_zero_byte_in_every_kind_of_header(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("b.png\0c.png", "d\0e.png"):
            member = tarfile.TarInfo("a.png")
            member.pax_headers = {"path": name}
            tar.addfile(member, io.BytesIO())
    assert [item.path for item in find_items([tmp_path / "s.tar"])] == [f"{tmp_path}/s.tar/b.png"]


def test_a_tar_without_members_or_end_marker_is_complete(tmp_path):
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


def test_a_member_that_cannot_be_read_any_more_is_an_error(tmp_path, monkeypatch):
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


def sparse(name: str, num_blocks: int) -> bytes:
    """A member in the old format of GNU tar, without data, whose list has `num_blocks` blocks."""
    header = tarfile.TarInfo(name)
    header.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    block[482] = num_blocks > 0
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    entries = [bytes(504) + bytes([number > 1]) + bytes(7) for number in range(num_blocks, 0, -1)]
    return bytes(block) + b"".join(entries)


@pytest.mark.parametrize("num_blocks", [0, 1, 1000])
def test_sparse_members_are_skipped(num_blocks, tmp_path):
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"1" * 700})
    tar.write_bytes(sparse("a.bin", num_blocks) + tar.read_bytes())
    assert [name for name, _ in tar_members(tar)] == ["a.png"]


def test_a_list_of_a_sparse_file_for_all_members_is_refused(tmp_path):
    header = {"GNU.sparse.map": ",".join(["1"] * 1000)}
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT, pax_headers=header) as made:
        made.addfile(tarfile.TarInfo("a.png"))
    with pytest.raises(ValueError, match=r"its global header marks all members as sparse; write it without --sparse"):
        list(tar_members(tmp_path / "s.tar"))


def test_a_sparse_member_with_a_long_list_is_refused(tmp_path):
    (tmp_path / "s.tar").write_bytes(sparse("a.bin", 1001))
    with pytest.raises(ValueError, match=r"a\.bin: the list of a sparse file must have at most 1000 blocks"):
        list(tar_members(tmp_path / "s.tar"))


def test_the_list_of_a_sparse_member_is_not_read(tmp_path):
    tar = make_tar(tmp_path / "s.tar", {"a.png": b"1" * 700})
    header = tarfile.TarInfo("a.bin")
    header.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.bin"}
    body = b"1000000\n" + b"0\n" * 100
    header.size = len(body)
    with tarfile.open(tmp_path / "p.tar", "w", format=tarfile.PAX_FORMAT) as made:
        made.addfile(header, io.BytesIO(body))
    joined = (tmp_path / "p.tar").read_bytes()[: 512 * 4] + tar.read_bytes()
    tar.write_bytes(joined)
    assert [name for name, _ in tar_members(tar)] == ["a.png"]


def test_links_in_a_tar_are_errors(tmp_path):
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
