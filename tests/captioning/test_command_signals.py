"""`mmvllm caption` as a process that is stopped by signals."""

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from mmvllm.processes.signals import FORCED_SECONDS
from tests.helpers.captioning.command import TINY, all_but_the_last, by_name, recorded, records, stats, until
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.hostile import slow_video
from tests.helpers.processes import spawned, wait_until_gone


@pytest.mark.spawns
def test_ctrl_c_ends_a_process_that_was_started_by_a_shell_command(checkpoint, images, names, out):
    command = [sys.executable, "-m", "mmvllm", "caption", names, "--model", checkpoint, *TINY, "--output", out]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    with started as process, all_but_the_last(images, names):
        until(lambda: recorded(out) > 0, 180)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=180)[1]
    assert process.returncode == 130 and "Traceback" not in err
    assert f"captioned      {len(by_name(out))}\n" in err


def test_the_first_ctrl_c_finishes_requests_in_flight(start, images, names, tmp_path, out):
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
    finished = [record["path"] for record in stopped.values()]  # images finish in any order
    assert start(*finished, "--output", whole).end().code == 0
    captions = {name: record["caption"] for name, record in by_name(whole).items()}
    assert {name: record["caption"] for name, record in stopped.items()} == captions
    assert start(images, "--output", out).end().code == 0
    assert len(by_name(out)) == 300


@pytest.mark.network
def test_the_second_ctrl_c_stops_at_once(start, images, out):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its image is in preparation for twenty seconds
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/silent.png"
        run = start(address, images, "--output", out, "--max-tokens", "900", "--workers", "2")
        until(lambda: out.with_name("out.jsonl.settings").exists())
        time.sleep(0.2)
        run.send(signal.SIGINT)
        until(lambda: "interrupt again to stop now" in run.err)
        run.send(signal.SIGINT)
        done = run.end(15)  # a run that waits for the image is killed, and has another exit code
    assert done.code == 130 and "Traceback" not in done.err
    assert "captioned  " not in done.err  # the summary of a complete run
    assert not out.exists() or "silent.png" not in by_name(out)


def test_sigterm_finishes_requests_in_flight(start, images, names, out):
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
    # The first signal may end the run, and the second may reach an interpreter that has restored the default handler.
    assert done.code in (130, -signal.SIGINT) and "Fatal" not in done.err
    assert len(records(out)) == 1


@pytest.mark.slow
def test_two_signals_end_a_run_that_decodes_a_video(start, out, tmp_path):
    (tmp_path / "slow.mkv").write_bytes(slow_video())
    run = start(tmp_path / "slow.mkv", "--output", out)
    until(lambda: any(seconds_of(decoder) > 5 for decoder in spawned(run.pid)), 120)
    run.send(signal.SIGINT)
    until(lambda: "interrupt again to stop now" in run.err)
    decoders = spawned(run.pid)
    run.send(signal.SIGINT)
    done = run.end(FORCED_SECONDS + 3.5)
    assert done.code == 130 and "Traceback" not in done.err and not out.exists()
    wait_until_gone([decoder.pid for decoder in decoders])


def seconds_of(process: psutil.Process) -> float:
    """The time of the processor that a process has taken; to import torch takes less than five seconds."""
    return process.cpu_times().user


@pytest.mark.slow
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
    assert f"captioned      {len(by_name(out))}\n" in done.err  # preparation was not interrupted


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

    until(are_gone)
