"""Each format is read back by its standard reader, and caption files have the right paths."""

import csv
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mmvllm import LLM
from mmvllm.captioning import caption_images
from mmvllm.captioning.jobs.pending_tasks import Selection
from mmvllm.captioning.outputs import tables
from mmvllm.captioning.outputs.caption_files import FILE_FORMATS
from mmvllm.captioning.outputs.options import FORMATS
from mmvllm.captioning.outputs.record import COLUMNS
from mmvllm.errors import ArgumentError
from tests.helpers.engine.requests import noise_image

NAMES = [
    "plain",
    "with space",
    "line\nbreak",
    'quote"s, comma',
    "日本語 😺",
    "semi;colon\ttab\rreturn",
    "\u2028\x85",
    "50%",
]
NO_FILE = "is not a file on disk, so no caption file can be beside it; choose an output folder"
AROUND = {"prefix": 'He said "hé" 🐈,\n', "suffix": "\r\n\u2028;\t'end'"}


@pytest.fixture(scope="module")
def llm(checkpoint):
    llm = LLM(checkpoint, device="cpu", dtype="float32", num_kvcache_blocks=256, skip_warmup=True)
    yield llm
    llm.exit()


@pytest.fixture
def caption(llm) -> Callable[..., list[dict]]:
    """Run `caption_images` to its end; returns the records."""

    def caption(*paths, **options) -> list[dict]:
        with caption_images(paths, llm=llm, **{"max_tokens": 4} | options) as run:
            return list(run)

    return caption


@pytest.fixture
def folder(tmp_path) -> Path:
    """Images with unusual names, and one that is damaged."""
    folder = tmp_path / "images"
    folder.mkdir()
    for i, name in enumerate(NAMES):
        noise_image(40 + i, 40, seed=i).save(folder / f"{name}.png")
    (folder / os.fsdecode(b"latin-\xe9.png")).write_bytes((folder / "plain.png").read_bytes())
    (folder / "broken.png").write_text("none")
    return folder


@pytest.fixture
def two(tmp_path) -> Path:
    """Two images, one of them in a subfolder."""
    folder = tmp_path / "two"
    (folder / "deep").mkdir(parents=True)
    noise_image(40, 40, seed=1).save(folder / "a.png")
    noise_image(40, 44, seed=2).save(folder / "deep/b.png")
    return folder


def read_jsonl(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_csv(path: Path) -> list[dict]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def files_below(folder: Path, suffix: str) -> dict[str, str]:
    found = sorted(folder.rglob(f"*{suffix}"))
    return {str(path.relative_to(folder)): path.read_bytes().decode() for path in found}


def shown(value) -> str:
    """The value as text formats write it."""
    return "" if value is None else str(value).encode("utf-8", "backslashreplace").decode()


# Formats


def test_json_lines_hold_every_record(caption, folder, tmp_path):
    made = caption(folder, output=tmp_path / "out.jsonl", **AROUND)
    assert read_jsonl(tmp_path / "out.jsonl") == made
    assert "日本語" in (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    assert len(made) == len(NAMES) + 2 and {os.path.basename(record["path"]) for record in made} == {
        path.name for path in folder.iterdir()
    }
    assert all(list(record) == list(COLUMNS) for record in made)
    assert all(
        r["caption"].startswith(AROUND["prefix"]) and r["caption"].endswith("'end'") for r in made if not r["error"]
    )


def test_csv_is_read_back_by_the_csv_module(caption, folder, tmp_path):
    made = caption(folder, output=tmp_path / "out.csv", **AROUND)
    rows = read_csv(tmp_path / "out.csv")
    assert rows == [{name: shown(value) for name, value in record.items()} for record in made]
    assert list(rows[0]) == list(COLUMNS)


def test_parquet_is_read_back_by_pyarrow_with_its_types(caption, folder, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    made = caption(folder, output=tmp_path / "out.parquet", **AROUND)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column_names == list(COLUMNS)
    kinds = {"string": str, "int64": int, "double": float}
    assert {field.name: kinds[str(field.type)] for field in table.schema} == COLUMNS | {"boxes": str}  # as JSON
    assert table.to_pylist() == [
        {name: shown(value) if isinstance(value, str) else value for name, value in record.items()} for record in made
    ]


def test_groups_of_rows_have_a_limited_size(tmp_path, monkeypatch):
    """A caption may have millions of characters."""
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(tables, "CHARACTERS_PER_GROUP", 1000)
    records = [
        dict.fromkeys(COLUMNS) | {"path": f"{i}", "caption": "x" * size} for i, size in enumerate([1, 999, 5, 2000])
    ]
    tables.write_parquet(tmp_path / "out.parquet", records, (), {})
    file = parquet.ParquetFile(tmp_path / "out.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [2, 2]
    assert [len(text) for text in file.read()["caption"].to_pylist()] == [1, 999, 5, 2000]


@pytest.mark.parametrize("format, suffix", [("txt", ".txt"), ("webdataset-json", ".json")])
def test_caption_files_are_captions_or_records(format, suffix, caption, folder, tmp_path):
    made = caption(folder, output=tmp_path / "out.jsonl", format=format, keep_line_breaks=True, **AROUND)
    good = [record for record in made if record["error"] is None]
    assert len(good) == len(NAMES) + 1, [record["error"] for record in made]
    for record in good:
        path = Path(record["path"]).with_suffix(suffix)
        text = path.read_bytes().decode()
        assert record["file"] == str(path)
        assert text == record["caption"] + "\n" if format == "txt" else json.loads(text) == record
    assert len(list(folder.glob(f"*{suffix}"))) == len(good)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_has_the_records_of_all_runs(suffix, caption, two, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / f"out.{suffix}"
    (two / "c.png").write_text("none")
    caption(two, output=out, limit=2)
    caption(two, output=out)
    noise_image(40, 40, seed=3).save(two / "c.png")
    caption(two, output=out, retry_failed=True)
    rows = read_csv(out) if suffix == "csv" else parquet.read_table(out).to_pylist()
    assert sorted(os.path.basename(row["path"]) for row in rows) == ["a.png", "b.png", "c.png"]
    assert all(row["caption"] and not row["error"] for row in rows)
    out.unlink()
    assert caption(two, output=out) == [] and out.exists()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_run_that_is_stopped_before_the_first_record_leaves_no_table(suffix, caption, two, llm, tmp_path):
    out = tmp_path / f"out.{suffix}"
    with caption_images(two, llm=llm, max_tokens=4, output=out) as run:
        run.stop()
        assert list(run) == []
    assert os.listdir(tmp_path) == ["two"]
    assert len(caption(two, output=out)) == 2
    before = out.read_bytes()
    with caption_images(two, llm=llm, max_tokens=4, output=out, overwrite=True) as run:
        run.stop()
        assert list(run) == []
    assert out.read_bytes() == before


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_of_another_program_is_refused(suffix, caption, two, tmp_path):
    out = tmp_path / f"out.{suffix}"
    out.write_text("mine")
    with pytest.raises(ValueError, match="exists and was not made by mmvllm"):
        caption(two, output=out)
    assert out.read_text() == "mine"
    assert len(caption(two, output=out, overwrite=True)) == 2


def test_the_default_format_follows_the_suffix(caption, two, tmp_path):
    caption(two, output=tmp_path / "a.CSV")
    assert len(read_csv(tmp_path / "a.CSV")) == 2
    caption(two, output=tmp_path / "b.csv", format="jsonl")
    assert len(read_jsonl(tmp_path / "b.csv")) == 2
    caption(two, output=tmp_path / "without")
    assert len(read_jsonl(tmp_path / "without")) == 2
    with pytest.raises(ValueError, match=f"format must be one of {', '.join(FORMATS)}, got 'xml'"):
        caption(two, format="xml")


@pytest.mark.parametrize("name", ["captions.json", "captions.xyz", "captions.txt"])
def test_an_unknown_suffix_needs_a_format(name, caption, two, tmp_path):
    expected = r"the suffix is not \.jsonl, \.csv or \.parquet; name it captions\.jsonl, or choose a format$"
    with pytest.raises(ArgumentError, match=expected):
        caption(two, output=tmp_path / name)
    assert os.listdir(tmp_path) == ["two"]
    caption(two, output=tmp_path / name, format="jsonl")
    assert len(read_jsonl(tmp_path / name)) == 2


# Caption files


def test_a_journal_with_edited_captions_is_resumed(caption, two, tmp_path):
    """The report's page writes such a journal."""
    caption(two, output=tmp_path / "out.csv")
    caption(two, format="txt", output=tmp_path / "out.jsonl")
    for path in (tmp_path / "out.csv.journal.jsonl", tmp_path / "out.jsonl"):
        edited = [record | {"caption": "by hand", "edited": True} for record in read_jsonl(path)]
        path.write_text("".join(f"{json.dumps(record)}\n" for record in edited))
    assert caption(two, output=tmp_path / "out.csv") == []
    assert [row["caption"] for row in read_csv(tmp_path / "out.csv")] == ["by hand", "by hand"]
    for path in two.rglob("*.txt"):
        path.unlink()
    assert caption(two, format="txt", output=tmp_path / "out.jsonl") == []
    assert set(files_below(two, ".txt").values()) == {"by hand\n"}


def test_images_with_the_same_stem_do_not_share_a_caption_file(caption, two, tmp_path):
    options = {"output": tmp_path / "out.jsonl", "format": "txt"}
    noise_image(40, 40, seed=5).save(two / "a.jpg")
    made = {os.path.basename(record["path"]): record for record in caption(two, **options)}
    assert made["a.jpg"]["error"] is None and made["b.png"]["error"] is None
    assert made["a.png"]["error"].startswith(f"{two / 'a.txt'} is the caption file of another image with this name")
    assert (two / "a.txt").read_text() == f"{made['a.jpg']['caption']}\n"
    noise_image(40, 40, seed=6).save(two / "a.bmp")  # now found first
    (later,) = caption(two, **options)
    assert "exists already" in later["error"]
    assert (two / "a.txt").read_text() == f"{made['a.jpg']['caption']}\n"


@pytest.mark.parametrize("format, suffix", [("txt", ".txt"), ("webdataset-json", ".json")])
def test_an_existing_caption_file_is_kept_unless_overwritten(format, suffix, caption, two, tmp_path):
    options = {"output": tmp_path / "out.jsonl", "format": format}
    (two / f"a{suffix}").write_text("mine")
    errors = {os.path.basename(record["path"]): record["error"] for record in caption(two, **options)}
    assert "exists already; allow overwriting, or skip existing" in errors["a.png"] and not errors["b.png"]
    assert (two / f"a{suffix}").read_text() == "mine"
    options["output"] = tmp_path / "other.jsonl"
    assert caption(two, **options, skip_existing=True) == []
    (two / f"deep/b{suffix}").unlink()
    (left,) = caption(two, **options, skip_existing=True)
    assert left["path"] == str(two / "deep/b.png") and (two / f"a{suffix}").read_text() == "mine"
    assert [record["error"] for record in caption(two, **options, overwrite=True)] == [None, None]
    assert (two / f"a{suffix}").read_text() != "mine"


@pytest.mark.parametrize("format, suffix", [("txt", ".txt"), ("webdataset-json", ".json")])
def test_an_output_folder_mirrors_the_tree_of_the_images(format, suffix, caption, two, tmp_path):
    (tmp_path / "captions").mkdir()
    made = caption(two, format=format, output_dir=tmp_path / "captions")
    assert list(files_below(tmp_path / "captions", suffix)) == [f"a{suffix}", f"deep/b{suffix}"]
    assert {record["file"] for record in made} == {
        str(tmp_path / "captions" / name) for name in (f"a{suffix}", f"deep/b{suffix}")
    }
    assert read_jsonl(tmp_path / "captions/captions.jsonl") == made
    assert not list(two.rglob(f"*{suffix}"))


@pytest.mark.network
def test_images_that_are_not_files_need_an_output_folder(caption, two, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(two / "a.png", "x/a.png")
    address = "http://127.0.0.1:1/dir/b.png"
    data = "data:image/png;base64,AAAA"
    (tmp_path / "list.jsonl").write_text(json.dumps({"image": data}))
    paths = (tmp_path / "shard.tar", address, tmp_path / "list.jsonl")
    made = caption(*paths, output=tmp_path / "out.jsonl", format="txt")
    assert [record["error"] for record in made] == [NO_FILE] * 3
    (tmp_path / "captions").mkdir()
    made = caption(*paths, format="txt", output_dir=tmp_path / "captions")
    assert {record["path"] for record in made if record["error"] is None} == {f"{tmp_path}/shard.tar/x/a.png"}
    assert list(files_below(tmp_path / "captions", ".txt")) == ["shard/x/a.txt"]


def test_a_retried_image_gets_its_caption_file(caption, two, tmp_path):
    options = {"output": tmp_path / "out.jsonl", "format": "txt"}
    (two / "c.png").write_text("none yet")
    assert sum(record["error"] is not None for record in caption(two, **options)) == 1
    noise_image(40, 40, seed=7).save(two / "c.png")
    (made,) = caption(two, **options, retry_failed=True)
    assert made["error"] is None
    assert (two / "c.txt").read_text() == f"{made['caption']}\n"


@pytest.mark.thinned(4)
@pytest.mark.parametrize("format", ["txt", "webdataset-json"])
@pytest.mark.parametrize("line", ["/", ".", "..", "{name}", "https://x.test/{name}"])
def test_a_line_without_an_image_does_not_end_the_run(line, format, caption, two, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmvllm.processors.images.load._download", lambda url: b"")
    (tmp_path / "captions").mkdir()
    line = line.format(name="x" * 300 + ".png")
    (tmp_path / "list.txt").write_text(f"{line}\n{two / 'a.png'}\n")
    output_dir = tmp_path / "captions" if line.startswith("https") else None
    made = caption(tmp_path / "list.txt", output=tmp_path / "out.jsonl", format=format, output_dir=output_dir)
    good = [record["path"] for record in made if record["error"] is None]
    assert (len(made), good) == (2, [str(two / "a.png")])


def test_a_caption_file_name_that_is_too_long_fails_only_its_image(caption, two, tmp_path):
    name = "x" * 251
    shutil.copy(two / "a.png", two / f"{name}.png")
    made = caption(two, output=tmp_path / "out.jsonl", format="webdataset-json")
    errors = {os.path.basename(record["path"]): record["error"] for record in made}
    assert errors["a.png"] is None and errors[f"{name}.png"] is not None


@pytest.mark.parametrize("start", ["file://", "file:", "FILE://"])
def test_a_file_url_creates_no_folders(start, caption, two, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.txt").write_text(f"{start}{two / 'a.png'}\n")
    (made,) = caption(tmp_path / "list.txt", output=tmp_path / "out.jsonl", format="txt")
    assert made["error"] == NO_FILE
    assert sorted(os.listdir(tmp_path)) == ["list.txt", "out.jsonl", "out.jsonl.settings", "two"]
    (made,) = caption(tmp_path / "list.txt", output=tmp_path / "plain.jsonl")
    assert made["error"] is None


def test_options_without_effect_on_a_format_are_refused(caption, two, tmp_path):
    for options in ({"output_dir": tmp_path}, {"skip_existing": True}):
        with pytest.raises(ValueError, match=r"needs a format with caption files \(txt, webdataset-json\), got csv"):
            caption(two, output=tmp_path / "out.csv", **options)
    with pytest.raises(ValueError, match=r"csv needs output FILE\.csv"):
        caption(two, format="csv")
    assert os.listdir(tmp_path) == ["two"]


# Shards


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_shards_are_disjoint_complete_and_stable_when_images_are_added(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # shards depend on the paths, which are relative here
    names = [f"{i}.png" for i in range(60)]
    for name in names:
        Path(name).touch()

    def shards() -> list[set[str]]:
        return [{item.path for item in Selection(["."], shard=(i, number)).items()} for i in range(1, number + 1)]

    before = shards()
    assert sum(map(len, before)) == 60 and set.union(*before) == {f"./{name}" for name in names}
    assert all(60 / number / 3 < len(shard) for shard in before)
    for i in range(60, 90):
        Path(f"{i}.png").touch()
    assert all(earlier <= later for earlier, later in zip(before, shards(), strict=True))


def test_a_new_format_with_a_file_per_image_is_one_entry(caption, two, monkeypatch):
    monkeypatch.setitem(FILE_FORMATS, "sizes", (".size", lambda record: f"{record['width']}x{record['height']}"))
    monkeypatch.setattr("mmvllm.captioning.outputs.output.FORMATS", (*FORMATS, "sizes"))
    caption(two, output=two / "out.jsonl", format="sizes")
    assert (two / "a.size").read_text() == "40x40\n" and (two / "deep/b.size").read_text() == "40x44\n"
    with pytest.raises(ValueError, match=r"with caption files \(txt, webdataset-json, sizes\), got csv"):
        caption(two, output=two / "out.csv", format="csv", skip_existing=True)
