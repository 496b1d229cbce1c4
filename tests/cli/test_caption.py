"""`mmvllm caption`: its output, files and exit codes; the text of captions is not tested here."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mmvllm
from mmvllm.captioning.outputs.record import COLUMNS
from mmvllm.cli.main import main
from tests.helpers.captioning.command import TINY

ROOT = Path(__file__).resolve().parent.parent.parent


def records(path: Path) -> list[dict]:
    with path.open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def test_a_folder_is_searched_and_every_image_gets_a_record(caption, images, tmp_path):
    code, out, _ = caption(images, "--prompt", "Count!", "--output", tmp_path / "out.jsonl")
    found = [str(images / name) for name in ("a.JPG", "b.png", "deep/a.bmp", "deep/er/c.webp", "with space.gif")]
    made = records(tmp_path / "out.jsonl")
    assert code == 0 and out == []
    assert sorted(record["path"] for record in made) == found
    assert all(list(record) == list(COLUMNS) for record in made)
    assert all(isinstance(record["caption"], str) and record["error"] is None for record in made)
    assert {record["prompt"] for record in made} == {"Count!"}


def test_a_file_that_is_given_twice_is_captioned_once(caption, images, tmp_path):
    paths = [images / "with space.gif", images / "a.JPG", images / "with space.gif"]
    assert caption(*paths, "--output", tmp_path / "out.jsonl")[0] == 0
    made = records(tmp_path / "out.jsonl")
    assert sorted(record["path"] for record in made) == [str(images / name) for name in ("a.JPG", "with space.gif")]


def test_errors_go_to_stderr_and_captions_to_stdout(caption, images):
    code, out, err = caption("/absent.png", images / "a.JPG")
    assert code == 3
    assert "/absent.png: no such file" in err.splitlines()
    assert "absent" not in "\n".join(out) and "\n".join(out).startswith(f"{images / 'a.JPG'}: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["describe"], "there is no command 'describe'"),
        (["caption", "--output", "x.jsonl"], "the following arguments are required: PATH"),
        (["caption", "x.png", "--max-tokens", "many"], "invalid int value: 'many'"),
    ],
)
def test_wrong_arguments_are_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    err = capsys.readouterr().err
    assert exit.value.code == 2 and message in err and "See mmvllm" in err


def test_a_folder_without_images_is_wrong_usage(caption, tmp_path):
    (tmp_path / "notes.txt").write_text("no image")
    code, out, err = caption(tmp_path)
    assert (code, out) == (2, [])
    assert err.startswith(f"mmvllm caption: {tmp_path} has no images (.apng, .avif, .bmp, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/model"], "model '/no/such/model' is neither a local folder nor a hub id"),
        (["--model", str(ROOT)], "not a checkpoint folder, it has no config.json"),
        (["--max-tokens", "0"], "--max-tokens must be an integer of at least 1, -1 or None, got 0"),
        (["--output", "/no/such/folder/out.jsonl"], "there is no folder /no/such/folder; make it first"),
        (["--output", "{images}"], "--output {images} is a folder; name a file"),
        (["--output", "{images}/captions.json"], "name it captions.jsonl, or choose a --format"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_values_end_with_a_message(arguments, message, caption, images):
    arguments, message = [each.format(images=images) for each in arguments], message.format(images=images)
    code, out, err = caption(images / "b.png", *arguments)
    assert (code, out) == (2, [])
    assert err.startswith("mmvllm caption: ") and message in err


def test_a_report_that_cannot_be_written_says_what_to_do(caption, images, tmp_path, monkeypatch):
    def fail(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mmvllm.captioning.outputs.report.write_report", fail)
    report = tmp_path / "report.html"
    code, _, err = caption(images / "b.png", "--output", tmp_path / "out.jsonl", "--report", report)
    assert code == 1
    assert err.endswith(f"mmvllm caption: {report} cannot be written: No space left on device; free space there\n")


def test_an_error_of_the_operating_system_is_a_sentence(caption, images, monkeypatch):
    def fail(_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/data/captions")

    monkeypatch.setattr("mmvllm.cli.caption.check", fail)
    code, _, err = caption(images / "b.png")
    expected = "choose a place where files can be written, or mount it with write access"
    assert (code, err) == (2, f"mmvllm caption: /data/captions: Read-only file system; {expected}\n")


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"mmvllm {mmvllm.__version__}\n"


@pytest.mark.spawns
def test_the_process_in_an_ascii_terminal(checkpoint, images):
    """`python -m mmvllm` with file names that the locale cannot encode."""
    odd = [images / "é.png", images / os.fsdecode(b"\xff.png")]
    for path in odd:
        path.write_bytes((images / "b.png").read_bytes())
    command = [
        sys.executable,
        "-m",
        "mmvllm",
        "caption",
        "--model",
        checkpoint,
        *TINY,
        *odd,
        "/absent.png",
    ]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 3
    assert "\\xe9.png: " in done.stdout and "\\udcff.png: " in done.stdout
    assert "/absent.png: no such file" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.spawns
def test_a_closed_pipe_ends_the_run_quietly(checkpoint, images):
    """`mmvllm caption ... | head -1`"""
    command = [sys.executable, "-m", "mmvllm", "caption", "--model", checkpoint, *TINY, images]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141
    assert "Traceback" not in err and "BrokenPipe" not in err


def test_the_bundled_model_is_announced_once(caption, images, capsys):
    assert main(["caption", str(images / "b.png"), *TINY, "--progress", "none"]) == 0
    err = capsys.readouterr().err
    assert err.count("bundled demonstration model") == 1 and "--model Qwen/Qwen2-VL-2B-Instruct" in err
    assert len(err.splitlines()) == 1
    assert "bundled" not in caption(images / "b.png", "--progress", "none")[2]
