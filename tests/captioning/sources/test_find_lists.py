"""The images that text lists, JSONL lists and standard input name."""

import json
import os
import threading
import tracemalloc
from contextlib import suppress
from itertools import islice

import pytest

from mmvllm.captioning.sources import lists as lists_module
from mmvllm.captioning.sources.find import find_items
from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.lists import MAX_LENGTHS
from tests.helpers.captioning.finding import put, relatives

DATA = "data:image/png;base64,iVBORw0K"


@pytest.mark.parametrize("name", ["list.txt", "list.LST"])
def test_a_text_list_has_one_image_per_line(name, tmp_path, monkeypatch):
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


def test_lists_with_bom_crlf_and_other_encodings_are_read(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfa.png\r\nb\xff.png\r\n\r\n\xef\xbb\xbfc.png")
    assert relatives(tmp_path / "list.txt") == ["a.png", "b\udcff.png", "\ufeffc.png"]
    (tmp_path / "list.jsonl").write_bytes(b'\xef\xbb\xbf{"image": "a.png"}\r\n\r\n{"image": "b.png"}')
    assert relatives(tmp_path / "list.jsonl") == ["a.png", "b.png"]


@pytest.fixture
def stdin():
    """The write end of a pipe that replaces standard input."""
    before, (end, start) = os.dup(0), os.pipe()
    os.dup2(end, 0)
    os.close(end)
    with open(start, "wb", buffering=0) as pipe:
        yield pipe
    os.dup2(before, 0)
    os.close(before)


@pytest.mark.parametrize("key", ["id", "prompt", "context", "image"])
def test_a_text_with_a_nul_is_refused(key, tmp_path):
    """Keys of tasks are made of the texts with a NUL between them."""
    (tmp_path / "list.jsonl").write_text(json.dumps({"image": "a.png", key: "a\0b"}))
    (item,) = find_items([tmp_path / "list.jsonl"])
    assert item.error == f'"{key}" has a NUL character'


@pytest.mark.parametrize(("key", "most"), MAX_LENGTHS.items())
def test_texts_that_records_repeat_are_limited(key, most, tmp_path):
    lines = [json.dumps({"image": "a.png", key: "x" * length}) for length in (most, most + 1)]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    first, second = find_items([tmp_path / "list.jsonl"])
    assert first.error is None and len(getattr(first, key)) == most
    assert second.error == f'"{key}" must have at most {most} characters, got {most + 1}'
    assert len(second.id or "") <= MAX_LENGTHS["id"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a" * 70_000, "is not a path or URL: it has 70000 characters"),
        ("a" * 300_000, "is not a path or URL: it has 300000 bytes"),
        ("a\0b", "has a NUL character"),
        ("data:image/png;base64,\0", "has a NUL character"),
        ("DATA:image/png;base64,\N{ROCKET}", "is a data URI with characters that are not ASCII"),
    ],
)
def test_a_line_of_text_that_is_no_name_is_an_error(name, reason, tmp_path):
    (tmp_path / "list.txt").write_text(f"{name}\nb.png\n")
    first, second = find_items([tmp_path / "list.txt"])
    assert first.error == reason and first.path == f"{tmp_path / 'list.txt'}:1" and second.error is None


def test_a_long_line_that_is_not_ascii_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    """One character may make it take four times its size, once as a line and once as a value."""
    monkeypatch.setattr(lists_module, "MAX_UNICODE_BYTES", 1000)
    lines = [{"image": "a.png", "junk": start + "x" * 1000} for start in ("\N{ROCKET}", "")]
    (tmp_path / "list.jsonl").write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    first, second = find_items([tmp_path / "list.jsonl"])
    assert "and characters that are not ASCII" in first.error and second.error is None


def test_standard_input_is_a_text_list(stdin):
    stdin.write(f"a.png\n{DATA}\n".encode())
    found = find_items(["-"])
    assert next(found) == Item("a.png", "a.png", "a.png")  # before the pipe is closed
    stdin.close()
    assert list(found) == [Item("-:2", "stdin-2", DATA)]
    os.fstat(0)  # standard input is still open


def test_lines_of_a_pipe_are_read_as_they_are_written(tmp_path):
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
    assert next(found).relative == "0.png"  # before the second line is written
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


@pytest.mark.parametrize("name", ["list.txt", "list.jsonl"])
@pytest.mark.parametrize("end", [b"\na.png\n", b""])
def test_a_line_without_end_is_an_error_and_takes_no_memory(name, end, tmp_path, monkeypatch):
    monkeypatch.setattr(lists_module, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(b"b.png\n")
        file.seek(100 << 20, os.SEEK_CUR)
        file.write(end or b" ")
    tracemalloc.start()
    first, second, *rest = find_items([path])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (second.path, second.error) == (f"{path}:2", "has more than 1 MiB") and most < 8 << 20
    assert len(rest) == (1 if end else 0)
    assert first.source is None if name == "list.jsonl" else first.error is None


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
        ("[" * 100_000, "is not valid JSON (it is nested too deeply)"),
        (json.dumps({"image": "a" * 70_000}), "is not a path or URL: it has 70000 characters"),
        ('{"image": "a.png", "x": [' + "{}," * 60_000 + "{}]}", "is not valid JSON (more than 100,000 values)"),
        ('{"image": "a.png", "id": ' + "9" * 10_000 + "}", "is not valid JSON (Exceeds the limit"),
        ('{"image": "data:image/png;base64,\\u00e9"}', "is a data URI with characters that are not ASCII"),
        ("7", 'is not an object; write {"image": PATH}'),
        ('{"name": "a.png"}', 'has no "image" or "video"; give a path, a URL or a data URI'),
        ('{"image": null}', 'has no "image" or "video"; '),
        ('{"image": ""}', 'has no "image" or "video"; '),
        ('{"image": ["a.png"]}', '"image" must be a string, got ["a.png"]'),
        ('{"image": "a.png", "prompt": 5}', '"prompt" must be a string, got 5'),
        ('{"image": "a.png", "context": {}}', '"context" must be a string, got {}'),
        ('{"image": "a.png", "id": 1.5}', '"id" must be a string or an integer, got 1.5'),
        ('{"image": "a.png", "id": true}', '"id" must be a string or an integer, got true'),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_malformed_line_is_an_error_and_the_other_lines_are_read(line, error, tmp_path):
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
def test_a_list_that_cannot_be_read_is_refused_before_the_search(name, tmp_path):
    with pytest.raises(ValueError, match=rf"{name}: the list cannot be read \(No such file or directory\)"):
        find_items([put(tmp_path, "a.png"), tmp_path / name])
