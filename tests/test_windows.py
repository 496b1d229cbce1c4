"""mmvllm without what Windows lacks: fcntl, resource, fork, SIGHUP, dir_fd and more. See helpers/windows."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path, PureWindowsPath

import pytest

from mmvllm.captioning.sources import names
from tests.helpers.captioning.command import recorded, records, until
from tests.helpers.engine.requests import noise_image

ROOT = Path(__file__).resolve().parent.parent
PATHS = (ROOT / "tests" / "helpers" / "windows", ROOT)
SOURCES = (path for folder in ("mmvllm", "kernels", "processors") for path in (ROOT / folder).rglob("*.py"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES if path.stem[0] != "_"]
MODULES = [name if name.startswith("mmvllm.") else f"mmvllm.{name}" for name in MODULES]
NEED_RAY = (
    *("mmvllm.captioning.jobs.ray_source", "mmvllm.captioning.jobs.ray_worker"),
    *("mmvllm.server.ray.deployment", "mmvllm.server.ray.replica"),
)
if find_spec("ray") is None:
    MODULES = [name for name in MODULES if name not in NEED_RAY]
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS)), "OMP_NUM_THREADS": "1"}
CAPTION = ("-m", "mmvllm", "caption", "--device", "cpu", "--max-tokens", "4", "--progress", "none")

IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from mmvllm.captioning.outputs import locked_file
assert locked_file.fcntl is None and locked_file.os.name == "nt" and not hasattr(locked_file.os, "fork")
"""


def start(*arguments, **options) -> subprocess.Popen:
    """Start Python as on Windows, in the repository root."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=ROOT, env=ENV, **pipes | options)


def caption(*arguments, code: int = 0) -> str:
    """Caption with the bundled model to the end; returns standard error."""
    process = start(*CAPTION, *arguments)
    err = process.communicate(timeout=300)[1]
    assert process.returncode == code, err
    return err


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    for i, name in enumerate(("a.png", "b.png", "sub/c.png")):
        noise_image(40 + i, 40, seed=i).save(folder / name)
    return folder


@pytest.mark.spawns
def test_every_module_is_imported():
    process = start("-c", IMPORT, *MODULES)
    err = process.communicate(timeout=300)[1]
    assert process.returncode == 0, err


@pytest.mark.spawns
def test_a_job_writes_records_and_retries_failures(images, tmp_path):
    out = tmp_path / "out.jsonl"
    good = (images / "b.png").read_bytes()
    (images / "b.png").write_bytes(good[:50])
    caption(images, "--output", out, code=3)
    assert len(records(out)) == 3 and b"\r" not in out.read_bytes()
    (images / "b.png").write_bytes(good)
    assert "cannot" not in caption(images, "--output", out, "--retry-failed")
    assert [record["error"] for record in records(out)] == [None] * 3  # the failure was removed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out.jsonl", "out.jsonl.settings"]


@pytest.mark.slow
def test_a_job_writes_caption_files_with_worker_processes(images, tmp_path):
    out = tmp_path / "out"
    caption(images, "--format", "txt", "--output-dir", out, "--worker-processes", "--workers", "1")
    captions = {Path(record["path"]).stem: record["caption"] for record in records(out / "captions.jsonl")}
    assert len(captions) == 3
    for path in (out / "a.txt", out / "b.txt", out / "sub" / "c.txt"):
        assert path.read_bytes() == f"{captions[path.stem]}\n".encode()


@pytest.mark.slow
def test_a_table_is_written_and_a_job_without_images_leaves_nothing(images, tmp_path):
    caption(images, "--output", tmp_path / "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 4
    (tmp_path / "empty").mkdir()
    err = caption(tmp_path / "empty", "--output", tmp_path / "none.jsonl", code=2)
    assert "has no images" in err and "cannot" not in err
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.slow
def test_a_second_job_is_refused_and_ctrl_c_ends_a_wait(images, tmp_path):
    out = tmp_path / "out.jsonl"
    first = start(*CAPTION, "-", "--output", out, stdin=subprocess.PIPE)
    try:
        print(images / "a.png", file=first.stdin, flush=True)
        until(lambda: recorded(out) == 1, 300)
        assert "another run is writing to it" in caption(images, "--output", out, code=2)
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130
        assert "stopping" in (err := first.stderr.read()) and "Traceback" not in err
    finally:
        first.kill()
        first.communicate()
    assert json.loads(out.read_text())["error"] is None


@pytest.mark.slow
def test_a_list_that_is_not_utf_8_is_a_failed_line(images, tmp_path):
    (tmp_path / "list.txt").write_bytes(b"caf\xe9.png\r\n" + os.fsencode(images / "a.png") + b"\r\n")
    caption(tmp_path / "list.txt", "--output", tmp_path / "out.jsonl", code=3)
    assert sorted(str(record["error"]) for record in records(tmp_path / "out.jsonl")) == ["None", "is not UTF-8 text"]


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("C:\\images\\a.png", "images/a.png"),
        ("\\\\server\\share\\a.png", "a.png"),
        ("..\\..\\a.png", "a.png"),
        ("sub/a:b?.png", "sub/a_b_.png"),
        ("C:a.png", "a.png"),
        ("sub./CON.png", "sub_/_CON.png"),
        ("nul", "_nul"),
        ("console.png", "console.png"),
        ("C:\\", "index"),
    ],
)
def test_names_below_an_output_folder_are_legal(path, want, monkeypatch):
    monkeypatch.setattr(names, "_ON_WINDOWS", True)
    monkeypatch.setattr(names, "PurePath", PureWindowsPath)
    assert names.relative_path(path) == want
