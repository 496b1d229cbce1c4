"""JSONL lists and tars of any content: every line and member is an item, and nothing but ValueError is raised."""

import io
import json
import os
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmvllm.captioning.sources.find import find_items
from mmvllm.captioning.sources.items import Item

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["a.png", "/", "..", "~", "~nobody/a.png", "\0", "x" * 300, "data:,", "http://[", "file:///a"])
FIELDS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("image", "prompt", "context", "id", "other"), NAMES | VALUES)
)
LINES = FIELDS.map(json.dumps).map(str.encode) | VALUES.map(json.dumps).map(str.encode) | st.binary(max_size=60)
MEMBERS = st.lists(
    st.tuples(st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["a.png", "../b.png", "/c.jpg"])),
    max_size=4,
)


def check(item: Item, folder: Path) -> None:
    """Whatever it was made from, an item stays below the output folder and has paths that can be used as keys."""
    relative = PurePosixPath(item.relative)
    assert item.relative and not relative.is_absolute() and ".." not in relative.parts and "\0" not in item.relative
    assert (item.source is None) <= (item.error is not None)
    assert isinstance(item.real_path, str) and (item.id is None or isinstance(item.id, str))
    assert all(value is None or isinstance(value, str) for value in (item.prompt, item.context))


def lists(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "list.jsonl")
        path.write_bytes(b"\n".join(lines))
        items = list(find_items([path]))
        given = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        assert len(items) == sum(bool(line.removesuffix(b"\r").strip()) for line in given)
        for item in items:
            check(item, Path(folder))


def made_tar(names: list[tuple[str]], format: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for (name,) in names:
            header = tarfile.TarInfo(name or "x")
            header.size = 700
            tar.addfile(header, io.BytesIO(bytes(700)))
    return buffer.getvalue()


def tars(names: list[tuple[str]], format: int, cut: int, changes: list[tuple[int, int]]) -> None:
    content = bytearray(made_tar(names, format))
    for at, value in changes:
        content[at % len(content)] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shard.tar")
        path.write_bytes(content[: cut % (len(content) + 1)])
        for item in find_items([path]):
            check(item, Path(folder))
            if item.error is None:
                assert 0 <= item.source.offset <= item.source.offset + item.source.size <= os.path.getsize(path)
                assert len(item.read()) == item.source.size


CHANGES = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6)
TARS = (MEMBERS, st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]), st.integers(0, 1 << 16), CHANGES)


@settings(max_examples=60)
@given(st.lists(LINES, max_size=6))
def test_every_line_of_a_list_is_an_item(lines):
    lists(lines)


@pytest.mark.slow
@settings(max_examples=20_000)
@given(st.lists(LINES, max_size=6))
def test_every_line_of_many_lists_is_an_item(lines):
    lists(lines)


@pytest.mark.slow
@settings(max_examples=60)
@given(*TARS)
def test_any_tar_gives_items_that_can_be_read(names, format, cut, changes):
    tars(names, format, cut, changes)


@pytest.mark.slow
@settings(max_examples=20_000)
@given(*TARS)
def test_many_tars_give_items_that_can_be_read(names, format, cut, changes):
    tars(names, format, cut, changes)
