"""The journal has complete records after any failure, and the index lets each task be claimed once."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.outputs import journal as journal_module
from mmvllm.captioning.outputs import record as record_module
from mmvllm.captioning.outputs.index import Index
from mmvllm.captioning.outputs.journal import Journal
from mmvllm.captioning.outputs.record import COLUMNS
from mmvllm.captioning.outputs.settings_file import VERSION
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.errors import ArgumentError

SETTINGS = CaptionSettings()
OTHER = CaptionSettings(prompt="Count!", max_tokens=7)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


def record(name: str, made_with: CaptionSettings = SETTINGS, **values) -> dict:
    known = {
        "path": name,
        "key": xxh3_128_hexdigest(ascii(name).encode()),
        "caption": 'a "cat"\n😺 é',
        "digest": ascii(name),
    }
    made = {"settings": made_with.fingerprint, "prompt": made_with.prompt, "finish_reason": "eos"}
    return dict.fromkeys(COLUMNS) | known | made | values


def write(path: Path, *records: dict, settings: CaptionSettings = SETTINGS, **options) -> None:
    journal = Journal(path, settings, **options)
    journal.begin()
    for one in records:
        journal.append(one)
    journal.close()


def write_settings(path: Path, settings: dict) -> None:
    content = {"version": VERSION, "settings": settings}
    path.with_name("out.jsonl.settings").write_text(json.dumps(content))


def assert_refused(path: Path, line: int) -> None:
    journal = Journal(path, SETTINGS)
    with pytest.raises(ArgumentError, match=f"{path}: line {line} is not a record of a caption"):
        journal.begin()
    journal.close()


def read(path: Path) -> list[dict]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


THREE = [record("a.png"), record("b.png", error="is empty", caption=None), record("c\n\udcff😺.png", id="\u2028 \x85")]


def test_records_are_read_back_unchanged(path):
    write(path, *THREE[:2])
    write(path, THREE[2])
    assert read(path) == THREE
    journal = Journal(path, SETTINGS)
    journal.begin()
    assert list(journal.records()) == THREE
    journal.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_truncated_last_line_is_removed_and_written_again(num_before, path, caplog):
    write(path, *THREE[:num_before])
    start = path.stat().st_size if num_before else 0
    write(path, THREE[2])
    whole = path.read_bytes()
    for length in range(start, len(whole)):
        path.write_bytes(whole[:length])
        journal = Journal(path, SETTINGS)
        journal.begin()
        if length == len(whole) - 1:  # an editor may save a file without its last line break
            assert path.read_bytes() == whole and journal.index.offset(THREE[2]["key"]) == start
            journal.close()
            continue
        assert path.read_bytes() == whole[:start]
        assert journal.index.offset(THREE[2]["key"]) is None
        assert journal.index.caption(SETTINGS.content_key(THREE[2]["digest"], SETTINGS.prompt)) is None
        journal.append(THREE[2])
        journal.close()
        assert path.read_bytes() == whole
    assert f"{path}: the last line is incomplete" in caplog.text


def test_zeros_after_the_last_record_are_removed(path):
    write(path, *THREE)  # a file system may leave zeros after a power failure
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(700))
    write(path)
    assert path.read_bytes() == whole


WRONG = {
    **{name: 7 for name, kind in COLUMNS.items() if kind is str},
    **{name: "7" for name, kind in COLUMNS.items() if kind is not str},
}
RAW = (*((name, value) for name, value in WRONG.items()), ("width", True), ("width", 2**63), ("time", 10**400))
RAW += (("key", "00"), ("key", None), ("path", None), ("settings", None), ("digest", None), ("caption", None))
RAW += (("captions", {}), ("captions", ["a"]), ("captions", [{"name": None, "caption": "a"}]))
RAW += (("captions", [{"name": [], "caption": "a", "finish_reason": "eos"}]), ("file", "a\0.txt"))


@pytest.mark.parametrize(("name", "value"), RAW, ids=[f"{name}={value!r:.20}" for name, value in RAW])
def test_a_record_with_a_value_of_another_type_is_refused_with_its_line(name, value, path):
    write(path, record("a.png"))
    path.write_text(path.read_text() + json.dumps(record("b.png") | {name: value}) + "\n")
    assert_refused(path, line=2)


@pytest.mark.parametrize("content", [b"\0", b" ", b"[", b'{"a":"'])
def test_a_line_without_an_end_is_refused_without_reading_it_whole(content, path, monkeypatch):
    monkeypatch.setattr(journal_module, "MAX_LINE_BYTES", 4096)
    monkeypatch.setattr(record_module, "MAX_LINE_BYTES", 4096)
    write(path, *THREE)
    with path.open("ab") as file:
        file.write(content * 2000)
        file.truncate(1 << 34)  # a sparse file
    assert_refused(path, line=4)
    assert path.stat().st_size == 1 << 34


@pytest.mark.parametrize(
    "values",
    [
        *[{"n": 200_000_000}, {"n": "4"}, {"n": 0}, {"prompts": 7}, {"prompts": ["a"]}, {"prompts": {"name": "a"}}],
        *[{"prompts": [{"name": 7}]}, {"n": 9000, "prompts": [{"name": "a"}, {"name": "b"}]}],
        *[7, None, []],
    ],
    ids=repr,
)
def test_settings_with_values_of_another_type_are_damaged(values, path):
    write(path, *THREE)
    write_settings(path, {SETTINGS.fingerprint: {}, "0" * 16: values})
    with pytest.raises(ArgumentError, match=rf"{path}\.settings is damaged \(.+\); start again with overwrite"):
        Journal(path, SETTINGS)


def test_more_settings_of_others_than_a_job_writes_are_refused(path):
    write(path, *THREE)
    write_settings(path, {f"{i:016x}": {"prompt": "x"} for i in range(1001)})
    with pytest.raises(ArgumentError, match="is damaged \\(it must have at most 1000 settings, got 1001\\)"):
        Journal(path, SETTINGS)


def test_the_difference_to_settings_of_others_is_short_and_printable(path):
    write(path, *THREE)
    write_settings(path, {"0" * 16: {f"\x1b[2J{i}": "x" * 300 for i in range(10_000)}})
    with pytest.raises(ArgumentError, match="was made with other settings") as error:
        Journal(path, SETTINGS)
    assert len(str(error.value)) < 3000 and "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [b"", b"not JSON", b'{"path": "a.png"', b"[1, 2]", b'{"path": "a.png"}', b"\xff\xfe", b"7", b"\0\0\0", b"null"],
)
@pytest.mark.parametrize("at", [0, 1])
def test_a_damaged_line_before_the_end_is_refused_with_its_number(damage, at, path):
    write(path, *THREE)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:at], damage + b"\n", *lines[at + 1 :]]))
    before = path.read_bytes()
    assert_refused(path, line=at + 1)
    assert path.read_bytes() == before


def test_a_complete_last_line_that_is_not_a_record_is_kept(path):
    write(path, *THREE)
    with path.open("a") as file:
        file.write('{"note": "mine"}\n')
    before = path.read_bytes()
    assert_refused(path, line=4)
    assert path.read_bytes() == before


def test_a_file_without_settings_is_refused(path):
    path.write_text('{"path": "mine"}\n')
    with pytest.raises(ValueError, match="exists and was not made by mmvllm"):
        Journal(path, SETTINGS)
    assert path.read_text() == '{"path": "mine"}\n' and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("text", ["", "{", "\0", '{"a"', "[" * 100_000], ids=lambda text: text[:9])
def test_damaged_settings_are_named(text, path):
    write(path, *THREE)
    path.with_name("out.jsonl.settings").write_text(text)
    with pytest.raises(ValueError, match=r"out\.jsonl\.settings is damaged .* start again with overwrite"):
        Journal(path, SETTINGS)
    write(path, THREE[0], overwrite=True)
    assert read(path) == THREE[:1]


def test_other_settings_are_refused_with_their_difference(path):
    write(path, *THREE)
    with pytest.raises(ValueError) as raised:
        Journal(path, OTHER)
    message = str(raised.value)
    assert "prompt was 'Describe this image.', is 'Count!'" in message and "max_tokens was 256, is 7" in message
    assert "temperature" not in message and "model" not in message
    write(path)  # the file was unlocked


def test_append_anyway_adds_the_settings(path):
    write(path, *THREE)
    write(path, record("a.png", OTHER, key="00" * 16), settings=OTHER, append_anyway=True)
    for settings in (SETTINGS, OTHER):
        write(path, settings=settings)
    assert len(read(path)) == 4


def test_overwrite_changes_nothing_before_it_begins(path):
    write(path, *THREE)
    before = path.read_bytes(), path.with_name("out.jsonl.settings").read_bytes()
    Journal(path, OTHER, overwrite=True).close()
    assert (path.read_bytes(), path.with_name("out.jsonl.settings").read_bytes()) == before
    write(path, record("a.png", OTHER), settings=OTHER, overwrite=True)
    assert len(read(path)) == 1
    with pytest.raises(ValueError, match="was made with other settings"):
        Journal(path, SETTINGS)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_journal_on_the_file_is_refused(overwrite, path):
    first = Journal(path, SETTINGS)
    first.begin()
    first.append(THREE[0])
    with pytest.raises(ValueError, match="another run is writing to it"):
        Journal(path, SETTINGS, overwrite=overwrite)
    first.append(THREE[1])
    first.close()
    first.close()
    write(path, THREE[2])
    assert read(path) == THREE


def test_the_file_stays_locked_when_it_is_rewritten(path):
    write(path, *THREE)
    write(path, record("b.png"))
    path.write_bytes(b"".join(json.dumps(one).encode() + b"\n" for one in [*THREE, record("b.png")]))
    journal = Journal(path, SETTINGS)
    journal.begin()  # this rewrites the file
    with pytest.raises(ValueError, match="another run is writing to it"):
        Journal(path, SETTINGS)
    journal.append(record("d.png"))
    journal.close()
    assert [one["path"] for one in read(path)] == ["a.png", THREE[2]["path"], "b.png", "d.png"]


def test_an_empty_output_is_deleted(path):
    write(path)
    assert os.listdir(path.parent) == []


def test_a_retried_failure_leaves_one_record(path):
    write(path, *THREE)
    journal = Journal(path, SETTINGS)
    journal.begin()
    again = record("b.png")
    assert journal.index.claim(again["key"], retry=True) and not journal.index.claim(again["key"], retry=True)
    journal.append(again)
    assert list(journal.records()) == [THREE[0], THREE[2], again]
    journal.close()
    assert read(path) == [THREE[0], THREE[2], again]


@pytest.mark.parametrize("written", [0, 1, 40])
def test_a_partial_record_is_removed_when_the_disk_is_full(written, path, monkeypatch):
    journal = Journal(path, SETTINGS)
    journal.begin()
    journal.append(THREE[0])
    real, calls = os.write, []

    def fail(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 1 and written:
            return real(file, data[:written])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(JobError, match=r"out\.jsonl cannot be written: No space left on device") as raised:
        journal.append(THREE[1])
    assert (raised.value.path, raised.value.errno) == (path, errno.ENOSPC)
    assert read(path) == THREE[:1]
    monkeypatch.undo()
    journal.append(THREE[2])
    journal.close()
    assert read(path) == [THREE[0], THREE[2]]


def test_partial_writes_are_continued(path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
    write(path, *THREE)
    assert read(path) == THREE


@pytest.mark.parametrize(
    ("settings", "values", "is_kept"),
    [
        (SETTINGS, {}, True),
        (CaptionSettings(temperature=1.0, seed=3), {}, True),
        (CaptionSettings(temperature=1.0), {}, False),
        (SETTINGS, {"error": "is empty"}, False),
        (SETTINGS, {"duplicate_of": "b.png"}, False),
        (OTHER, {"settings": SETTINGS.fingerprint}, False),
    ],
)
def test_repeatable_captions_are_stored_for_equal_images(settings, values, is_kept, path):
    one = record("a.png", settings, **values)
    write(path, one, settings=settings)
    journal = Journal(path, settings, append_anyway=True)
    journal.begin()
    kept = journal.index.caption(settings.content_key(one["digest"], one["prompt"]))
    journal.close()
    assert kept == (one if is_kept else None)


# Index


@pytest.mark.slow
def test_each_task_is_claimed_once_by_any_number_of_threads():
    index = Index()
    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(lambda i: index.claim(str(i % 300)), range(2400)))
    assert sum(given) == 300


def test_only_failed_tasks_are_claimed_for_a_retry():
    index = Index()
    index.note("good", failed=False, offset=0)
    index.note("bad", failed=True, offset=10)
    assert not index.claim("good") and not index.claim("bad")
    assert [index.claim(key, retry=True) for key in ("good", "new", "bad", "bad")] == [False, False, True, False]


def test_the_last_record_of_a_task_counts():
    index = Index()
    index.claim("a")
    assert index.offset("a") is None and index.offset("b") is None
    assert index.note("a", failed=True, offset=3)
    assert not index.note("a", failed=False, offset=5)
    assert index.offset("a") == 5


def test_the_first_caption_of_a_content_is_kept():
    index = Index()
    index.keep_caption("content", THREE[2])
    index.keep_caption("content", THREE[0])
    assert index.caption("content") == THREE[2] and index.caption("other") is None
