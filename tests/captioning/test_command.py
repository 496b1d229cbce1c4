"""`mmvllm caption` as a process on real files: it is killed, stopped, starved of disk and fed with bad images."""

import csv
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.requests import noise_image

TINY = ("--device", "cpu", "--max-tokens", "4")

# Imports torch once, runs once to import what comes late, and forks a process for every run: a start costs a tenth of a
# second, and a run is still a process of its own, with signals and limits of its own. What root may do beyond others'
# rights is given up. Python's own end takes half a second, and is left out where a test is not about it.
SERVER = """
import ctypes, gc, json, os, resource, sys
import torch
from mmvllm.cli.main import main

torch.set_num_threads(1)
libc, header, rights = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(header, rights)
rights[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
libc.capset(header, rights)
commands, replies = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
assert main(sys.argv[3:]) == 0
gc.freeze()
for line in commands:
    job = json.loads(line)
    if "wait" in job:
        reply = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
    elif (reply := os.fork()) == 0:
        os.setsid()
        os.chdir(job["folder"])
        for fd, (name, mode) in enumerate(((job["stdin"], 0), ("stdout", 0o1101), ("stderr", 0o1101))):
            os.dup2(os.open(name, mode, 0o600), fd)
        if job["max_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["max_bytes"], job["max_bytes"]))
        try:
            code = main(job["arguments"])
        except SystemExit as exit:
            code = exit.code
        sys.stdout.flush()
        if job["has_end"]:
            sys.exit(code)
        os._exit(code)
    print(reply, file=replies, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Done:
    """`code` is negative for a process that a signal ended."""

    code: int
    out: str
    err: str


class Run:
    """A run under way; its streams are files in a folder of its own."""

    def __init__(self, ask: Callable[..., int], streams: Path, **job):
        self._ask, self._streams = ask, streams
        self._code: int | None = None
        for name in ("stdout", "stderr"):  # it may be killed before it has made them
            (streams / name).touch()
        self.pid = ask(**job)

    @property
    def err(self) -> str:
        return (self._streams / "stderr").read_text(errors="replace")

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def send_all(self, number: int) -> None:
        """Also to its worker processes, as a terminal does."""
        os.killpg(self.pid, number)

    def end(self, seconds: float = 120) -> Done:
        """Wait for the end; a run that takes longer is killed, and has the code -9."""
        if self._code is None:
            timer = threading.Timer(seconds, self.send, [signal.SIGKILL])
            timer.start()
            self._code = self._ask(wait=self.pid)
            timer.cancel()
        return Done(self._code, (self._streams / "stdout").read_text(errors="replace"), self.err)


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """ask(**job) -> the server's answer."""
    (commands, ask_end), (reply_end, replies) = os.pipe(), os.pipe()
    warm = many(tmp_path_factory.mktemp("warm") / "images", 1)
    command = [sys.executable, "-c", SERVER, str(commands), str(replies), "caption", str(warm), "--model", checkpoint]
    process = subprocess.Popen([*command, *TINY], pass_fds=(commands, replies), stdin=subprocess.DEVNULL)
    os.close(commands)
    os.close(replies)
    with open(ask_end, "w") as writer, open(reply_end) as reader:

        def ask(**job) -> int:
            print(json.dumps(job), file=writer, flush=True)
            return int(reader.readline())

        yield ask
    assert process.wait(60) == 0


@pytest.fixture
def start(server, checkpoint, tmp_path_factory):
    """Start `mmvllm caption` on the tiny model in an empty folder -> `Run`."""

    runs: list[Run] = []

    def start(*arguments, stdin: str | Path = os.devnull, max_bytes: int | None = None, has_end: bool = False) -> Run:
        streams = tmp_path_factory.mktemp("run")
        arguments = ["caption", "--model", str(checkpoint), *TINY, *map(str, arguments)]
        job = {"folder": str(streams), "stdin": str(stdin), "max_bytes": max_bytes, "has_end": has_end}
        runs.append(Run(server, streams, arguments=arguments, **job))
        return runs[-1]

    yield start
    for run in runs:
        with suppress(ProcessLookupError):
            run.send_all(signal.SIGKILL)
        run.end()


@pytest.fixture
def caption(start) -> Callable[..., Done]:
    """Run `mmvllm caption` on the tiny model to its end."""
    return lambda *arguments, **options: start(*arguments, **options).end()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four images."""
    return many(tmp_path / "images", 4)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """More images than the engine has at once."""
    return many(tmp_path_factory.mktemp("many") / "images", 300)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def names(tmp_path) -> Path:
    """A list that is read while it is written."""
    path = tmp_path / "names.txt"
    os.mkfifo(path)
    return path


@contextmanager
def all_but_the_last(images: Path, names: Path) -> Iterator[None]:
    """Name images to a run that reads `names`, the last one at the end of the `with`: until then it cannot finish."""
    *first, last = sorted(images.iterdir())
    with open(os.open(names, os.O_RDWR), "w") as lines:  # opened so, it waits for no reader
        print(*first, sep="\n", file=lines, flush=True)
        yield
        print(last, file=lines, flush=True)


def many(folder: Path, number: int) -> Path:
    folder.mkdir()
    for i in range(number):
        noise_image(40 + i % 7, 40, seed=i).save(folder / f"{i:03}.png")
    return folder


def records(path: Path) -> list[dict]:
    """Of a file of JSON lines, none of them torn."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


def by_name(path: Path) -> dict[str, dict]:
    """Name of the image -> its record, of which there is one."""
    found = records(path)
    named = {os.path.basename(record["path"]): record for record in found}
    assert len(named) == len(found)
    return named


def recorded(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until(is_true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


def stats(group: int) -> list[str]:
    """/proc/PID/stat of every process of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            stat = path.read_text()
            if int(stat.rpartition(")")[2].split()[2]) == group:
                found.append(stat)
    return found


# Killed, and going on


def test_after_twenty_kills_every_image_is_recorded_once(start, images, names, out):
    moments = random.Random(0)
    options = ("--output", out, "--progress", "none")
    before = b""
    for _ in range(20):
        run = start(names, *options)
        with all_but_the_last(images, names):
            more = min(299, recorded(out) + moments.randrange(10))
            until(lambda least=more: recorded(out) >= least)
            time.sleep(moments.random() * 0.02)
            run.send(signal.SIGKILL)
            assert run.end().code == -signal.SIGKILL
        after = out.read_bytes()
        assert after.startswith(before)  # what is recorded stays
        before = after[: after.rfind(b"\n") + 1]
    assert start(images, *options).end().code == 0
    assert out.read_bytes().startswith(before)
    assert sorted(by_name(out)) == [f"{i:03}.png" for i in range(300)]
    assert all(record["error"] is None for record in records(out))


@pytest.mark.parametrize("suffix", ["csv", "txt"])
def test_after_kills_tables_and_caption_files_are_complete(suffix, start, tmp_path):
    images, out = many(tmp_path / "many", 80), tmp_path / f"out.{suffix}"
    arguments = (images, "--output", out, "--format", suffix, "--progress", "none")
    journal = tmp_path / "out.csv.journal.jsonl" if suffix == "csv" else out
    for i in range(3):
        run = start(*arguments)
        until(lambda least=20 * i + 10: recorded(journal) >= least)
        run.send(signal.SIGKILL)
        run.end()
    assert start(*arguments).end().code == 0
    captions = {record["path"]: record["caption"] for record in by_name(journal).values()}
    if suffix == "csv":
        with out.open(newline="", encoding="utf-8") as file:
            made = {row["path"]: row["caption"] for row in csv.DictReader(file)}
    else:
        made = {str(path.with_suffix(".png")): path.read_text()[:-1] for path in images.glob("*.txt")}
    assert len(captions) == 80
    assert made == captions


def test_a_run_that_is_done_does_nothing_when_repeated(caption, folder, out):
    assert caption(folder, "--output", out).code == 0
    before = out.read_bytes(), out.stat().st_mtime_ns
    done = caption(folder, "--output", out)
    assert (done.code, done.out) == (0, "")
    assert "skipped" in done.err and "4 (recorded before, or not selected)" in done.err
    assert (out.read_bytes(), out.stat().st_mtime_ns) == before


def test_images_that_come_later_are_added(caption, folder, out):
    caption(folder, "--output", out)
    before = out.read_bytes()
    noise_image(50, 50, seed=9).save(folder / "0.png")
    assert caption(folder, "--output", out).code == 0
    assert out.read_bytes().startswith(before) and len(by_name(out)) == 5


def test_other_settings_are_refused_with_the_difference(caption, folder, out):
    caption(folder, "--output", out)
    before = out.read_bytes()
    done = caption(folder, "--output", out, "--prompt", "Count!", "--seed", "3")
    assert done.code == 2 and out.read_bytes() == before
    assert "prompt was 'Describe this image.', is 'Count!'; seed was None, is 3" in done.err
    assert "--append-anyway" in done.err and "--overwrite" in done.err and "max_tokens" not in done.err


def test_append_anyway_adds_and_then_both_settings_go_on(caption, folder, out):
    caption(folder, "--output", out)
    before = out.read_bytes()
    other = (folder, "--output", out, "--prompt", "Count!")
    assert caption(*other, "--append-anyway").code == 0
    assert out.read_bytes().startswith(before) and len(records(out)) == 8
    assert [record["prompt"] for record in records(out)[4:]] == ["Count!"] * 4
    assert all(record["duplicate_of"] is None for record in records(out))
    for arguments in (other, (folder, "--output", out)):
        assert caption(*arguments).code == 0
        assert len(records(out)) == 8


def test_overwrite_begins_anew(caption, folder, out):
    caption(folder, "--output", out)
    assert caption(folder / "000.png", "--output", out, "--prompt", "Count!", "--overwrite").code == 0
    assert [record["prompt"] for record in records(out)] == ["Count!"]
    assert caption(folder, "--output", out, "--prompt", "Count!").code == 0
    assert len(by_name(out)) == 4


@pytest.mark.parametrize(
    "mistake", [["--model", "/no/such/model"], ["--max-tokens", "0"], ["--device", "toaster"], ["--shard", "3/2"]]
)
def test_overwrite_with_a_mistake_leaves_the_earlier_output_alone(mistake, caption, folder, out, tmp_path):
    caption(folder, "--output", out)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert caption(folder, "--output", out, "--overwrite", *mistake).code == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("name", ["notes.jsonl", "notes.csv", "notes.parquet"])
def test_a_foreign_file_is_refused(name, caption, folder, tmp_path):
    (tmp_path / name).write_text('{"path": "mine"}\n')
    done = caption(folder, "--output", tmp_path / name)
    assert done.code == 2 and "was not made by mmvllm" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"images", name}
    assert (tmp_path / name).read_text() == '{"path": "mine"}\n'


def test_a_damaged_line_is_refused_with_its_number(caption, folder, out):
    caption(folder, "--output", out)
    lines = out.read_bytes().splitlines(keepends=True)
    damaged = b"".join([lines[0], lines[1][:40] + b"\n", *lines[2:]])
    out.write_bytes(damaged)
    done = caption(folder, "--output", out)
    assert done.code == 2 and f"{out}: line 2 is not a record" in done.err
    assert out.read_bytes() == damaged


# Stopped


def test_ctrl_c_of_a_process_that_was_started_as_people_do(checkpoint, images, names, out):
    command = [sys.executable, "-m", "mmvllm", "caption", names, "--model", checkpoint, *TINY, "--output", out]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    with started as process, all_but_the_last(images, names):
        until(lambda: recorded(out) > 0, 180)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=180)[1]
    assert process.returncode == 130 and "Traceback" not in err
    assert f"captioned      {len(by_name(out))}\n" in err


def test_a_first_ctrl_c_finishes_what_is_begun(start, images, names, tmp_path, out):
    whole = tmp_path / "whole.jsonl"
    run = start(names, "--output", out)
    with all_but_the_last(images, names):
        until(lambda: recorded(out) > 0)
        run.send(signal.SIGINT)
        until(lambda: "stopping" in run.err)
    done = run.end()
    assert done.code == 130 and done.out == ""
    assert "stopping: images in flight are finished first" in done.err
    assert "Traceback" not in done.err and "images/s" in done.err
    stopped = by_name(out)
    assert 0 < len(stopped) < 300
    assert f"captioned      {len(stopped)}" in done.err
    finished = [record["path"] for record in stopped.values()]  # not the first ones: images finish in any order
    assert start(*finished, "--output", whole).end().code == 0
    captions = {name: record["caption"] for name, record in by_name(whole).items()}
    assert {name: record["caption"] for name, record in stopped.items()} == captions
    assert start(images, "--output", out).end().code == 0
    assert len(by_name(out)) == 300


def test_a_second_ctrl_c_stops_at_once(start, images, out):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its image is begun, and waited for twenty seconds
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/silent.png"
        run = start(address, images, "--output", out, "--max-tokens", "900", "--workers", "2")
        until(lambda: out.with_name("out.jsonl.settings").exists())
        time.sleep(0.2)
        run.send(signal.SIGINT)
        until(lambda: "interrupt again to stop now" in run.err)
        run.send(signal.SIGINT)
        done = run.end(15)  # which ends, with another code, a run that waits for the image after all
    assert done.code == 130 and "Traceback" not in done.err
    assert "captioned  " not in done.err  # what a run says that has finished its work
    assert not out.exists() or "silent.png" not in by_name(out)


def test_sigterm_finishes_what_is_begun(start, images, names, out):
    run = start(names, "--output", out.with_suffix(".csv"))
    journal = out.with_name("out.csv.journal.jsonl")
    with all_but_the_last(images, names):
        until(lambda: recorded(journal) > 0)
        run.send(signal.SIGTERM)
        until(lambda: "stopping" in run.err)
    assert run.end().code == 143
    with out.with_suffix(".csv").open(newline="") as file:
        table = [row["path"] for row in csv.DictReader(file)]
    assert 0 < len(table) < 300
    assert table == [record["path"] for record in records(journal)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_does_not_wait_for_the_next_line_of_standard_input(number, start, folder, out, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    run = start("-", "--output", out, stdin=tmp_path / "fifo", has_end=True)
    with (tmp_path / "fifo").open("w") as lines:
        print(folder / "000.png", file=lines, flush=True)
        until(lambda: recorded(out) == 1)
        run.send(number)
        assert run.end().code == 128 + number


def test_two_signals_end_a_run_that_waits_for_standard_input(start, folder, out, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    run = start("-", "--output", out, stdin=tmp_path / "fifo", has_end=True)
    with (tmp_path / "fifo").open("w") as lines:
        print(folder / "000.png", file=lines, flush=True)
        until(lambda: recorded(out) == 1)
        run.send(signal.SIGINT)
        until(lambda: "interrupt again to stop now" in run.err)
        run.send(signal.SIGINT)
        done = run.end()
    # The first one ends the run already: a second one that is late meets a Python that no longer handles it.
    assert done.code in (130, -signal.SIGINT) and "Fatal" not in done.err
    assert len(records(out)) == 1


def test_ctrl_c_in_a_terminal_leaves_worker_processes_to_finish(start, names, tmp_path, out):
    large = tmp_path / "large"
    large.mkdir()
    for i in range(40):
        noise_image(1200, 1200, seed=i).save(large / f"{i:02}.png", compress_level=1)
    run = start(names, "--output", out, "--worker-processes")
    with all_but_the_last(large, names):
        until(lambda: recorded(out) >= 3, 120)
        run.send_all(signal.SIGINT)
        until(lambda: "stopping" in run.err)
    done = run.end()
    assert done.code == 130 and "Traceback" not in done.err
    assert f"captioned      {len(by_name(out))}\n" in done.err  # DEFECT: what a worker had begun ends the run at once


def test_worker_processes_do_not_outlive_a_killed_run(start, images, out):
    run = start(images, "--output", out, "--worker-processes")
    until(lambda: recorded(out) > 0, 120)
    run.send(signal.SIGKILL)
    run.end()

    def are_gone() -> bool:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, 0)
            return all(" Z " in stat for stat in stats(run.pid))
        return True

    until(are_gone)  # DEFECT: they wait for work for ever


# Bad images


def bad_files(folder: Path) -> dict[str, str]:
    """Name -> what its record says."""
    whole = (folder / "000.png").read_bytes()
    header = struct.pack(">II5B", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    (folder / "empty.png").touch()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_text("Dear Sir or Madam")
    (folder / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + whole[33:])
    os.mkfifo(folder / "fifo.png")
    (folder / "nowhere.png").symlink_to("gone.png")
    (folder / "circle.png").symlink_to("circle.png")
    shutil.copy(folder / "000.png", folder / "secret.png")
    (folder / "secret.png").chmod(0)
    (folder / "locked").mkdir()
    (folder / "locked").chmod(0)
    (folder / "x.png").mkdir()
    return {
        "empty.png": "is empty (0 bytes)",
        "cut.png": "damaged or truncated",
        "text.png": "not a picture that Pillow can read",
        "huge.png": "too large to decode",
        "fifo.png": "a device or a pipe",
        "nowhere.png": "no such file",
        "circle.png": "cannot be read",
        "secret.png": "Permission denied",
        "locked": "folder cannot be read (Permission denied)",
    }


def test_each_bad_file_is_a_record_and_its_neighbours_are_untouched(caption, folder, out, tmp_path):
    assert caption(folder, "--output", tmp_path / "good.jsonl").code == 0
    errors = bad_files(folder)
    done = caption(folder, "--output", out)
    made, good = by_name(out), by_name(tmp_path / "good.jsonl")
    assert done.code == 3 and "Traceback" not in done.err
    assert made.keys() == good.keys() | errors.keys()
    for name, message in errors.items():
        assert message in made[name]["error"] and str(folder) not in made[name]["error"], name
        assert made[name]["caption"] is None and made[name]["digest"] is None
    for name in good:
        assert {**made[name], "time": 0, "seconds": 0} == {**good[name], "time": 0, "seconds": 0}


def test_a_folder_or_a_missing_file_that_is_named_is_a_record(caption, folder, out, tmp_path):
    (tmp_path / "x.png").mkdir()
    (tmp_path / "list.txt").write_text(f"x.png\nabsent.png\n{folder}/000.png\n")
    assert caption(tmp_path / "list.txt", "--output", out).code == 3
    errors = {name: record["error"] for name, record in by_name(out).items()}
    assert errors == {"x.png": "is a folder, not a picture", "absent.png": "no such file", "000.png": None}


def test_retry_failed_takes_only_those_and_leaves_one_record_of_each(caption, folder, out):
    errors = bad_files(folder)
    caption(folder, "--output", out)
    before = by_name(out)
    noise_image(30, 30, seed=90).save(folder / "new.png")
    noise_image(30, 30, seed=91).save(folder / "text.png")
    (folder / "secret.png").chmod(0o600)
    done = caption(folder, "--output", out, "--retry-failed")
    after = by_name(out)
    assert done.code == 3 and after.keys() == before.keys()
    assert {name for name, record in after.items() if record["error"]} == errors.keys() - {"text.png", "secret.png"}
    assert after["secret.png"]["duplicate_of"] == str(folder / "000.png")
    assert all(after[name] == before[name] for name in before if before[name]["error"] is None)
    for name in ("empty.png", "cut.png", "huge.png", "fifo.png", "nowhere.png", "circle.png"):
        (folder / name).unlink()
        noise_image(30, 30, seed=92).save(folder / name)
    (folder / "locked").rmdir()
    assert caption(folder, "--output", out, "--retry-failed").code == 0
    assert by_name(out).keys() == before.keys() - {"locked"}  # a place that can be looked into is no failure


def test_a_killed_retry_is_cleaned_up_by_the_next_run(start, names, tmp_path, out):
    images = tmp_path / "images"
    images.mkdir()
    for i in range(150):
        (images / f"{i:03}.png").write_text("none yet")
    assert start(images, "--output", out).end().code == 3
    for i in range(150):
        noise_image(40, 40, seed=i).save(images / f"{i:03}.png")
    run = start(names, "--output", out, "--retry-failed")
    with all_but_the_last(images, names):
        until(lambda: recorded(out) >= 160)
        run.send(signal.SIGKILL)
        assert run.end().code == -signal.SIGKILL
    whole = out.read_bytes().rpartition(b"\n")[0]  # the last line may be half there
    kept = [json.loads(line) for line in whole.split(b"\n")[150:]]
    assert start(images, "--output", out, "--retry-failed").end().code == 0
    made = by_name(out)
    assert len(made) == 150 and all(record["error"] is None for record in made.values())
    assert all(made[os.path.basename(record["path"])] == record for record in kept)


def test_fail_fast_stops_at_the_first_failure(caption, images, out):
    assert caption("/absent.png", images, "--output", out, "--fail-fast", "--workers", "1").code == 3
    assert "absent.png" in by_name(out) and len(records(out)) < 300


def test_a_folder_may_change_while_it_is_read(start, tmp_path, out):
    images, ended = many(tmp_path / "many", 200), threading.Event()

    def change() -> None:
        for i in range(100_000):
            if ended.is_set():
                return
            path = images / f"{i % 200:03}-passing.png"
            if path.exists():
                path.unlink()
            else:
                shutil.copy(images / "000.png", path)

    thread = threading.Thread(target=change)
    thread.start()
    done = start(images, "--output", out).end()
    ended.set()
    thread.join()
    made = by_name(out)
    passing = {name: made.pop(name) for name in list(made) if "passing" in name}
    assert done.code in (0, 3) and "Traceback" not in done.err
    assert sorted(made) == [f"{i:03}.png" for i in range(200)]
    assert all(record["error"] is None for record in made.values())
    causes = ("no such file", "is empty", "damaged or truncated", "not a picture")
    assert all(any(cause in record["error"] for cause in causes) for record in passing.values() if record["error"])


# Equal images


def test_equal_images_are_captioned_once(caption, folder, out):
    shutil.copy(folder / "000.png", folder / "copy.png")
    noise_image(40, 40, seed=0).save(folder / "encoded.png", compress_level=0)
    noise_image(40, 40, seed=0).save(folder / "other.bmp")
    done = caption(folder, "--output", out)
    made = by_name(out)
    assert done.code == 0 and "3 (caption copied from an equal image)" in done.err
    equal = [made.pop(name) for name in ("000.png", "copy.png", "encoded.png", "other.bmp")]
    (first,) = [record for record in equal if record["duplicate_of"] is None]  # whichever was prepared first
    for record in equal:
        assert record["duplicate_of"] in (None, first["path"])
        assert (record["caption"], record["digest"]) == (first["caption"], first["digest"])
    assert [record["duplicate_of"] for record in made.values()] == [None] * 3


def test_equal_images_are_found_when_a_run_goes_on(caption, folder, out):
    caption(folder, "--output", out)
    shutil.copy(folder / "002.png", folder / "later.png")
    done = caption(folder, "--output", out)
    made = by_name(out)
    assert made["later.png"]["duplicate_of"] == str(folder / "002.png")
    assert made["later.png"]["caption"] == made["002.png"]["caption"]
    assert "captioned      0\n" in done.err


def test_another_prompt_is_another_piece_of_work(caption, folder, out, tmp_path):
    lines = [{"image": "000.png"}, {"image": "000.png", "prompt": "Count!"}, {"image": "000.png", "context": "A cat."}]
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert caption(folder / "list.jsonl", "--output", out).code == 0
    made = records(out)
    assert len(made) == 3 and all(record["duplicate_of"] is None for record in made)
    assert len({record["prompt"] for record in made}) == 3


@pytest.mark.parametrize(("seed", "num_duplicates"), [([], 0), (["--seed", "5"], 2)])
def test_sampled_captions_are_shared_only_with_a_seed(seed, num_duplicates, caption, folder, out):
    for name in ("copy.png", "copy2.png"):
        shutil.copy(folder / "000.png", folder / name)
    assert caption(folder, "--output", out, "--temperature", "1", *seed).code == 0
    assert sum(record["duplicate_of"] is not None for record in records(out)) == num_duplicates
    shutil.copy(folder / "001.png", folder / "later.png")
    assert caption(folder, "--output", out, "--temperature", "1", *seed).code == 0
    assert (by_name(out)["later.png"]["duplicate_of"] is not None) == bool(seed)


# Which images


def test_shards_together_are_all_images_and_none_twice(caption, tmp_path):
    images = many(tmp_path / "many", 60)  # so many that no shard is empty, wherever they are
    outs = [tmp_path / f"{i}.jsonl" for i in (1, 2, 3)]
    for i, out in enumerate(outs, 1):
        assert caption(images, "--output", out, "--shard", f"{i}/3").code == 0
    found = [name for out in outs for name in by_name(out)]
    assert sorted(found) == [f"{i:03}.png" for i in range(60)]


def test_limit_makes_progress_when_a_run_goes_on(caption, folder, out):
    (folder / "001.png").write_text("a failure is progress too")
    counts = []
    for _ in range(3):
        caption(folder, "--output", out, "--limit", "2")
        counts.append(len(by_name(out)))
    assert counts == [2, 4, 4]


@pytest.mark.parametrize("kind", ["txt", "stdin", "fifo.txt", "jsonl"])
def test_lists_name_images(kind, start, folder, out, tmp_path):
    names = [str(folder / f"{i:03}.png") for i in range(4)]
    text = "".join(f"{name}\n" for name in names)
    if kind == "jsonl":
        text = "".join(json.dumps({"image": name, "id": i}) + "\n" for i, name in enumerate(names))
    path = tmp_path / ("list.txt" if kind == "stdin" else f"list.{kind}")
    if kind == "fifo.txt":
        os.mkfifo(path)
        run = start(path, "--output", out)
        path.write_text(text)
    else:
        path.write_text(text)
        run = start(*(("-",) if kind == "stdin" else (path,)), "--output", out, stdin=path)
    assert run.end().code == 0
    made = sorted(records(out), key=lambda record: record["path"])
    assert [record["path"] for record in made] == names
    assert [record["id"] for record in made] == (["0", "1", "2", "3"] if kind == "jsonl" else [None] * 4)


def test_images_of_a_tar_are_named_by_shard_and_member(caption, folder, out, tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for i in range(4):
            tar.add(folder / f"{i:03}.png", f"a/{i}.png")
    assert caption(folder, "--output", tmp_path / "files.jsonl").code == 0
    assert caption(tmp_path / "shard.tar", "--output", out).code == 0
    made, files = by_name(out), by_name(tmp_path / "files.jsonl")
    assert {record["path"] for record in made.values()} == {f"{tmp_path}/shard.tar/a/{i}.png" for i in range(4)}
    assert all(made[f"{i}.png"]["caption"] == files[f"{i:03}.png"]["caption"] for i in range(4))


# Where records cannot go


def test_an_output_that_may_not_be_written_is_refused(caption, folder, out, tmp_path):
    out.write_text("")
    out.chmod(0o444)
    (tmp_path / "closed").mkdir(mode=0o555)
    for path in (out, tmp_path / "closed/out.jsonl", tmp_path / "closed/out.csv", Path("/proc/out.jsonl"), tmp_path):
        done = caption(folder, "--output", path)
        assert done.code == 2 and done.err.startswith("mmvllm caption: ") and str(path) in done.err
        assert "Traceback" not in done.err
    done = caption(folder, "--format", "txt", "--output-dir", tmp_path / "closed")
    assert done.code == 2 and "Permission denied" in done.err


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt"])
def test_a_full_disk_ends_the_run_and_the_same_command_finishes_it(suffix, caption, tmp_path):
    images, out = many(tmp_path / "many", 40), tmp_path / f"out.{suffix}"
    arguments = (images, "--output", out, "--format", suffix)
    done = caption(*arguments, max_bytes=10_000)
    journal = tmp_path / "out.csv.journal.jsonl" if suffix == "csv" else out
    made = by_name(journal)
    assert done.code == 1 and "Traceback" not in done.err
    assert f"{journal} cannot be written: File too large" in done.err
    missing = done.err.partition("In flight and not recorded: ")[2].partition(".png")[0]
    assert missing.startswith(str(images)) and f"{os.path.basename(missing)}.png" not in made
    assert 0 < len(made) < 40 and journal.stat().st_size <= 10_000
    assert caption(*arguments).code == 0
    assert len(by_name(journal)) == 40
    if suffix == "csv":
        assert len(list(csv.DictReader(out.open(newline="")))) == 40
    if suffix == "txt":
        assert len(list(images.glob("*.txt"))) == 40
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_disk_that_is_full_at_once_is_said_in_a_line(caption, folder, out, tmp_path):
    done = caption(folder, "--output", out, max_bytes=150 + len(str(out)))  # which the message must fit into
    assert done.code in (1, 2) and "Traceback" not in done.err and "File too large" in done.err
    assert caption(folder, "--output", out).code == 0
    assert len(by_name(out)) == 4


def test_a_second_run_into_the_same_output_is_refused(start, caption, images, tmp_path, out):
    os.mkfifo(tmp_path / "fifo")
    first = start("-", "--output", out, stdin=tmp_path / "fifo")
    with (tmp_path / "fifo").open("w") as lines:
        print(images / "000.png", file=lines, flush=True)
        until(lambda: recorded(out) == 1)
        for option in ((), ("--overwrite",), ("--append-anyway", "--prompt", "Count!")):
            done = caption(images, "--output", out, *option)
            assert done.code == 2 and f"{out}: another run is writing to it" in done.err
        print(*images.glob("*.png"), sep="\n", file=lines, flush=True)
    assert first.end().code == 0
    assert len(by_name(out)) == 300


def test_a_list_that_is_read_is_not_taken_for_the_output(caption, folder, tmp_path):
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps({"image": str(folder / "000.png")}) + "\n")
    done = caption(path, "--output", path, "--overwrite")
    assert path.exists() and json.loads(path.read_text())["image"]  # DEFECT: the list is emptied, then unlinked
    assert done.code == 2 and str(path) in done.err


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_an_output_that_is_no_plain_file_is_refused_and_not_taken_away(kind, start, folder, out):
    if kind == "fifo":
        os.mkfifo(out)
    else:
        out.symlink_to("/dev/null")  # not the device itself: it would be taken away
    done = start(folder, "--output", out).end()
    assert os.path.lexists(out)
    assert done.code == 2 and "is not a plain file" in done.err


def test_an_output_that_is_a_link_stays_one(caption, folder, out, tmp_path):
    out.symlink_to("elsewhere.jsonl")
    (folder / "000.png").write_text("none")
    assert caption(folder, "--output", out).code == 3
    noise_image(30, 30).save(folder / "000.png")
    assert caption(folder, "--output", out, "--retry-failed").code == 0
    assert len(by_name(out)) == 4
    assert out.is_symlink() and len(by_name(tmp_path / "elsewhere.jsonl")) == 4


def test_an_image_in_a_locked_folder_does_not_end_the_run(caption, folder, out, tmp_path):
    (tmp_path / "locked").mkdir(mode=0)
    (tmp_path / "list.txt").write_text(f"{tmp_path}/locked/a.png\n{folder}/000.png\n")
    done = caption(tmp_path / "list.txt", "--output", out, "--format", "txt")
    assert done.code == 3, done.err
    assert by_name(out)["000.png"]["error"] is None


# Streams


def test_captions_go_to_stdout_and_all_else_to_stderr(caption, folder, tmp_path):
    (folder / "bad.png").write_text("none")
    done = caption(folder, "--format", "jsonl")
    made = [json.loads(line) for line in done.out.splitlines()]
    assert done.code == 3 and {os.path.basename(r["path"]) for r in made} == {path.name for path in folder.iterdir()}
    assert "captioned" in done.err and "failed" in done.err


@pytest.mark.parametrize("mode", ["auto", "log", "bar", "none"])
def test_progress_is_shown_on_stderr_alone(mode, caption, folder, out):
    done = caption(folder, "--output", out, "--progress", mode)
    assert (done.code, done.out) == (0, "")
    assert ("captioned" in done.err) == (mode != "none")
    assert ("%|" in done.err) == (mode == "bar")


def test_presets_are_listed(caption):
    done = caption("--list-presets")
    assert done.code == 0
    assert [line.partition(":")[0] for line in done.out.splitlines()] == [
        "short",
        "detailed",
        "alt-text",
        "tags",
        "ocr",
    ]


# What is asked


def test_the_prompt_comes_from_the_command_a_file_or_a_preset(caption, folder, out, tmp_path):
    (tmp_path / "prompt.txt").write_text("What is here? é\n", encoding="utf-8")
    arguments = {"Count!": ["--prompt", "Count!"], "What is here? é": ["--prompt-file", tmp_path / "prompt.txt"]}
    for preset in ("short", "detailed", "alt-text", "tags", "ocr"):
        text = caption("--list-presets").out.partition(f"{preset}: ")[2].partition("\n")[0]
        arguments[text] = ["--preset", preset]
    for options in arguments.values():
        assert caption(folder / "000.png", "--output", out, "--append-anyway", *options).code == 0
    assert [record["prompt"] for record in records(out)] == list(arguments)
    for wrong in (["--preset", "long"], ["--prompt", "a", "--preset", "tags"], ["--prompt-file", tmp_path / "absent"]):
        assert caption(folder / "000.png", "--output", out, *wrong).code == 2


def test_a_system_message_and_pixel_bounds_change_what_the_model_sees(caption, folder, out):
    tokens = []
    noise_image(112, 112).save(folder / "large.png")
    for options in ([], ["--system", "You are brief."], ["--min-pixels", "18000"], ["--max-pixels", "4000"]):
        path = out.with_name(f"{len(tokens)}.jsonl")
        assert caption(folder / "large.png", "--output", path, *options).code == 0
        (record,) = records(path)
        tokens.append((record["prompt_tokens"], record["image_tokens"]))
    plain, system, larger, smaller = tokens
    assert system[0] > plain[0] and system[1] == plain[1]
    assert larger[1] > plain[1] > smaller[1]
    assert larger[0] - larger[1] == plain[0] - plain[1] == smaller[0] - smaller[1]


def test_words_around_the_caption(caption, folder, out):
    caption(folder / "000.png", "--output", out.with_name("plain.jsonl"))
    options = ["--prefix", "A photo: ", "--suffix", " (end)", "--trigger-word", "sks"]
    assert caption(folder / "000.png", "--output", out, *options).code == 0
    (plain,), (around,) = records(out.with_name("plain.jsonl")), records(out)
    assert around["caption"] == f"A photo: sks, {plain['caption']} (end)"


def test_a_list_gives_each_image_its_own_prompt_context_and_id(caption, folder, out):
    lines = [
        {"image": "000.png"},
        {"image": "001.png", "prompt": "Count!", "id": 7},
        {"image": "002.png", "context": "A cat.", "id": "c"},
        {"image": "003.png", "prompt": "Count!", "context": "A cat."},
        {"image": 5},
    ]
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{")
    assert caption(folder / "list.jsonl", "--output", out, "--prompt", "Say.").code == 3
    made = by_name(out)
    asked = {name: (record["id"], record["prompt"]) for name, record in made.items() if record["error"] is None}
    assert asked == {
        "000.png": (None, "Say."),
        "001.png": ("7", "Count!"),
        "002.png": ("c", "Context: A cat.\n\nSay."),
        "003.png": (None, "Context: A cat.\n\nCount!"),
    }
    assert made["list.jsonl:5"]["error"] and made["list.jsonl:6"]["error"]
