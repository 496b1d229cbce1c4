"""Folders, lists and captions as people have them: of NAS systems, of trainers, of the hub, and mmvllm's own."""

import csv
import io
import json
import subprocess
import sys
import tarfile

import pytest

from mmvllm.captioning import caption_images
from mmvllm.captioning.sources.counts import Counts
from mmvllm.captioning.sources.find import find_items
from mmvllm.cli.main import main
from mmvllm.errors import ArgumentError
from tests.helpers.captioning.command import TINY
from tests.helpers.captioning.finding import put, relatives
from tests.helpers.engine.requests import noise_image

OF_SYSTEMS = [
    "@eaDir/a.png/SYNOPHOTO_THUMB_XL.png",
    "#recycle/b.png",
    "deep/@eaDir/c.png",
    "#snapshot/d.png",
    "@Recycle/e.png",
    "@Recently-Snapshot/f.png",
    "$RECYCLE.BIN/S-1-5-21/g.png",
    "System Volume Information/h.png",
    "__MACOSX/._i.png",
    "__MACOSX/j.png",
    "lost+found/k.png",
    "~snapshot/hourly.0/l.png",
]
OF_PEOPLE = ["#1.png", "#best/m.png", "@home/n.png", "$/o.png", "recycle/p.png", "snapshot/q.png", "~/r.png"]


def test_folders_that_systems_make_are_counted_as_hidden(tmp_path):
    folder = put(tmp_path / "d", *OF_SYSTEMS, *OF_PEOPLE)
    ignored = Counts()
    assert sorted(item.relative for item in find_items([folder], ignored)) == sorted(OF_PEOPLE)
    assert ignored == {"hidden": 11}  # folders; one is not entered twice
    assert sorted(relatives(f"{folder}/**/*.png")) == sorted(OF_PEOPLE)
    assert [item.error for item in find_items([f"{folder}/*/SYNO*.png"])] == ["nothing matches this pattern"]


def test_a_folder_of_a_system_may_be_named(tmp_path):
    folder = put(tmp_path / "d", *OF_SYSTEMS)
    assert relatives(folder / "#recycle") == ["b.png"]
    assert relatives(f"{folder}/@eaDir/**/*.png") == ["a.png/SYNOPHOTO_THUMB_XL.png"]
    assert relatives(f"{folder}/*/@eaDir/*.png") == ["deep/@eaDir/c.png"]


def test_folders_of_systems_in_a_tar(tmp_path):
    put(tmp_path / "d", *OF_SYSTEMS, *OF_PEOPLE)
    with tarfile.open(tmp_path / "d.tar", "w") as tar:
        tar.add(tmp_path / "d", "d")
    ignored = Counts()
    found = sorted(item.relative.removeprefix("d/d/") for item in find_items([tmp_path / "d.tar"], ignored))
    assert found == sorted(OF_PEOPLE) and ignored["hidden"] == len(OF_SYSTEMS)


def test_texts_beside_given_images_are_captions(tmp_path):
    folder = put(tmp_path, "a.png", "B.JPG", "c.webm", "d.tar.png")
    for name in ("a.txt", "B.TXT", "c.txt", "d.tar.txt"):
        (folder / name).write_text("a caption of two words")
    (folder / "list.txt").write_text("a.png\n")
    given = sorted(path for path in folder.iterdir())
    ignored = Counts()
    found = [item.path for item in find_items(given, ignored)]
    assert found == [str(folder / name) for name in ("B.JPG", "a.png", "c.webm", "d.tar.png", "a.png")]
    assert ignored == {".txt": 4}


def test_a_list_that_is_given_without_its_images_is_a_list(tmp_path):
    folder = put(tmp_path, "a.png", "list.png")
    (folder / "list.txt").write_text("a.png\n")
    assert [item.path for item in find_items([folder / "list.txt"])] == [str(folder / "a.png")]


@pytest.mark.parametrize(
    "entry",
    [
        {"image": "x/a.png"},
        {"file_name": "x/a.png", "text": "a caption"},  # the hub's imagefolder
        {"image": "x/a.png", "conversations": []},  # LLaVA
        {"images": ["x/a.png"], "messages": []},  # LLaMA-Factory and ms-swift
        {"image_path": "x/a.png"},
        {"img": "x/a.png"},
        {"filepath": "x/a.png"},
        {"url": None, "filename": "x/a.png"},
        {"file_name": "no.png", "image": "x/a.png"},
    ],
)
def test_keys_that_name_an_image(entry, tmp_path):
    put(tmp_path, "x/a.png")
    (tmp_path / "list.jsonl").write_text(json.dumps(entry))
    (item,) = find_items([tmp_path / "list.jsonl"])
    assert (item.path, item.error, item.is_video) == (str(tmp_path / "x/a.png"), None, False)


@pytest.mark.parametrize("entry", [{"video": "a.mp4"}, {"path": "a.mp4"}, {"videos": ["a.mp4"]}, {"file": "a.mp4"}])
def test_keys_that_name_a_video(entry, tmp_path):
    put(tmp_path, "a.mp4")
    (tmp_path / "list.jsonl").write_text(json.dumps(entry | {"start": 1, "end": 2}))
    (item,) = find_items([tmp_path / "list.jsonl"])
    assert (item.path, item.error, item.is_video, item.start) == (str(tmp_path / "a.mp4"), None, True, 1.0)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"images": ["a.png", "b.png"]}, '"image" must be a string, got ["a.png", "b.png"]'),
        ({"images": []}, '"image" must be a string, got []'),
        ({"path": 5}, '"image" must be a string, got 5'),
        ({"text": "a.png"}, 'has no "image" or "video"'),
    ],
)
def test_an_entry_without_one_file_is_an_error(entry, error, tmp_path):
    (tmp_path / "list.jsonl").write_text(json.dumps(entry))
    (item,) = find_items([tmp_path / "list.jsonl"])
    assert error in item.error


def test_records_are_a_list(llm, tmp_path):
    """The next job does not use their prompts, which include contexts."""
    noise_image(60, 60).save(tmp_path / "a.png")
    (tmp_path / "bad.png").write_text("none")
    options = {"llm": llm, "max_tokens": 2}
    list(caption_images([tmp_path / "a.png", tmp_path / "bad.png"], output=tmp_path / "o.jsonl", **options))
    made = list(caption_images(tmp_path / "o.jsonl", prompt="Count.", **options))
    assert [(record["path"], record["prompt"]) for record in made] == [
        (str(tmp_path / name), "Count.") for name in ("bad.png", "a.png")
    ]


def test_a_minus_is_no_output(tmp_path, llm, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    noise_image(60, 60).save("a.png")
    with pytest.raises(ArgumentError, match="output must be a file, from which a run can be resumed, got -"):
        caption_images("a.png", llm=llm, output="-")
    assert main(["caption", "a.png", "--output", "-"]) == 2
    assert "--output must be a file, from which a run can be resumed, got -" in capsys.readouterr().err
    for arguments in (["caption", "a.png", "--report", "-"], ["bench", "latency", "--output", "-"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "must be a file, got -" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png"]


@pytest.mark.spawns
def test_a_minus_reads_a_prompt_from_standard_input(tmp_path):
    noise_image(60, 60).save(tmp_path / "a.png")
    command = [sys.executable, "-m", "mmvllm", "caption", tmp_path / "a.png", "--format", "jsonl", "--max-tokens", "1"]
    done = subprocess.run([*command, *TINY, "--prompt-file", "-"], input="Zähle.\n".encode(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["prompt"] == "Zähle."


@pytest.mark.parametrize("arguments", [["-", "--prompt-file", "-"], ["a.png", "--prompt-file", "-", "--schema", "-"]])
def test_standard_input_is_read_once(arguments, capsys):
    assert main(["caption", *arguments]) == 2
    assert "are -, but only one of them can read standard input; name files" in capsys.readouterr().err


def test_a_table_may_begin_with_a_mark(llm, tmp_path):
    noise_image(60, 60).save(tmp_path / "Möwe.png")
    options = {"llm": llm, "max_tokens": 1}
    for mark in (False, True):
        out = tmp_path / f"{mark}.csv"
        list(caption_images(tmp_path / "Möwe.png", output=out, byte_order_mark=mark, **options))
        assert out.read_bytes().startswith(b"\xef\xbb\xbfpath," if mark else b"path,")
        (row,) = csv.DictReader(io.StringIO(out.read_text(encoding="utf-8-sig")))
        assert row["path"].endswith("Möwe.png")
    with pytest.raises(ArgumentError, match="byte_order_mark needs the format csv, got jsonl"):
        caption_images(tmp_path / "Möwe.png", output=tmp_path / "o.jsonl", byte_order_mark=True, **options)
