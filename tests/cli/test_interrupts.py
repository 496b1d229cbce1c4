"""Ctrl-C while a command starts ends it without a traceback; a second signal ends it whatever it waits for."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from mmvllm import __main__
from mmvllm.processes.signals import FORCED_SECONDS
from tests.helpers.engine.async_engines import wait_until
from tests.helpers.processes import spawned, wait_until_gone

ROOT = Path(__file__).resolve().parent.parent.parent
# The process interrupts itself when it begins to import a module, which is before the module of that name is found.
INTERRUPTED = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if the tests run in the background

class Interrupt:
    def find_spec(name, *_):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)

program, moment, *sys.argv[1:] = sys.argv[1:]
sys.meta_path.insert(0, Interrupt)
sys.argv[0] = program
if program == "mmvllm":
    runpy.run_module("mmvllm", run_name="__main__", alter_sys=True)
else:
    runpy.run_path(program, run_name="__main__")
"""
END_SECONDS = FORCED_SECONDS + 3.5  # after a second signal, on a busy machine
MMVLLM = sys.executable, "-m", "mmvllm"
COMMANDS = {
    "caption": ["caption", "examples/images"],
    "serve": ["serve", "--port", "0"],
    "demo": ["demo"],
    "bench": ["bench", "latency"],
    "info": ["info"],
}


@contextmanager
def running(*command: str, **options) -> Iterator[subprocess.Popen]:
    """A command, which is killed in the end."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupted(program: str, moment: str, *args: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", INTERRUPTED, program, moment, *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("command", "moment"),
    [
        *(("caption", name) for name in ("mmvllm.cli.main", "mmvllm.cli.caption", "numpy", "transformers")),
        *((name, "torch") for name in COMMANDS),
    ],
)
def test_ctrl_c_while_modules_are_imported_is_no_traceback(command, moment):
    done = interrupted("mmvllm", moment, *COMMANDS[command])
    assert done.returncode == -signal.SIGINT, done.stderr  # a shell shows it as 130
    assert "Traceback" not in done.stderr and "KeyboardInterrupt" not in done.stderr
    assert done.stdout == ""


@pytest.mark.spawns
def test_the_demo_app_is_interrupted_as_the_command_is():
    done = interrupted("demo_app.py", "gradio")
    assert done.returncode == -signal.SIGINT and "Traceback" not in done.stderr, done.stderr


@pytest.mark.spawns
def test_an_ignored_sigint_stays_ignored():
    code = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from mmvllm.__main__ import main
assert main(["info", "--model", "nosuch"]) == 2
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_the_installed_command_is_the_same_function():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"mmvllm": f"{__main__.main.__module__}:{__main__.main.__name__}"}


WAITING = """
import signal, sys, time
from contextlib import nullcontext
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from mmvllm.cli.caption import stopping
from mmvllm.processes.signals import signals_deferred
from mmvllm.processes.pool import WorkerPool
from tests.helpers.media import tasks

if __name__ == "__main__":
    workers = WorkerPool(1)
    processes = workers.run(tasks.pid), workers.run(tasks.start_process_that_sleeps)
    pool = ThreadPoolExecutor(1)
    pool.submit(time.sleep, 1234)  # Python waits for it at its end
    stop = lambda: print("stopping", file=sys.stderr, flush=True)
    with stopping(SimpleNamespace(stop=stop)), {"deferred": signals_deferred, "handled": nullcontext}[sys.argv[1]]():
        print(*processes, flush=True)
        time.sleep(1234)
"""


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGINT, "handled"), (signal.SIGTERM, "handled"), (signal.SIGTERM, "deferred")]
)
def test_a_second_signal_ends_the_program_and_its_processes_whatever_they_wait_for(number, how, tmp_path):
    env, script = os.environ | {"PYTHONPATH": str(ROOT)}, tmp_path / "script.py"
    script.write_text(WAITING)
    with running(sys.executable, str(script), how, env=env, stderr=subprocess.PIPE) as process:
        children = [*map(int, process.stdout.readline().split())]
        for child in children:  # as those that wait for a lost device, they do not notice their parent's end
            os.kill(child, signal.SIGSTOP)
        process.send_signal(number)
        assert how == "deferred" or "stopping" in process.stderr.readline()
        process.send_signal(number)
        while how == "deferred" and process.poll() is None:  # two that come at the same time are one
            process.send_signal(number)
            time.sleep(0.2)
        assert process.wait(END_SECONDS) == 128 + number
    wait_until_gone(children)


FIRST = "from mmvllm.processes.signals import run_below_first_process\nrun_below_first_process()\n"


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("rest", "code"),
    [("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_first_process_ends_with_the_code_of_the_one_below_it(rest, code):
    done = subprocess.run([sys.executable, "-c", FIRST + rest], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == code


@pytest.mark.spawns
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_process_hands_signals_on(number):
    rest = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1234)"
    with running(sys.executable, "-c", FIRST + rest) as process:
        below = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    wait_until_gone([below])


@pytest.mark.spawns
def test_below_the_first_process_of_a_terminal_standard_input_can_be_read():
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", FIRST + "print('got ' + input(), flush=True)"])
    os.write(terminal, b"a line\n")
    received = b""
    while b"got a line" not in received:
        received += os.read(terminal, 1024)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


@pytest.mark.spawns
@pytest.mark.parametrize(("command", "number"), [("serve", signal.SIGTERM), ("caption", signal.SIGINT)])
def test_a_command_that_is_the_first_process_of_a_container_ends_while_it_loads(command, number):
    """Linux ignores signals to such a process unless it has a handler."""
    container = ["unshare", "--fork", "--pid", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*container, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a PID namespace")
    with running(*container, *MMVLLM, *COMMANDS[command]) as outside:
        wait_until(lambda: len(psutil.Process(outside.pid).children(recursive=True)) == 2, "started")
        first, below = psutil.Process(outside.pid).children(recursive=True)
        wait_until(lambda: loads_torch(below), "loading")
        first.send_signal(number)
        assert outside.wait(END_SECONDS) == 128 + number and outside.stdout.read() == ""
    wait_until_gone([first.pid, below.pid])


@pytest.mark.spawns
@pytest.mark.parametrize("command", ["serve", "caption"])
def test_sigterm_ends_a_command_while_it_loads(command):
    with running(*MMVLLM, *COMMANDS[command]) as process:
        wait_until(lambda: loads_torch(psutil.Process(process.pid)), "loading")
        process.terminate()
        assert process.wait(END_SECONDS) == -signal.SIGTERM and process.stdout.read() == ""


def loads_torch(process: psutil.Process) -> bool:
    return any("libtorch" in part.path for part in process.memory_maps())


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--drain-timeout", "2"]])
def test_two_signals_end_a_server_whose_rank_does_not_answer(options):
    options = ["--device", "cpu", "--num-kvcache-blocks", "64", "--tensor-parallel-size", "2", *options]
    with running(*MMVLLM, *COMMANDS["serve"], *options, stderr=subprocess.PIPE) as process:
        url = process.stdout.readline().split()[-1]
        (rank,) = spawned(process.pid)[:1]
        rank.suspend()
        body = {"model": "bundled", "prompt": "A star", "max_tokens": 500, "ignore_eos": True}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{url}/completions", json=body, timeout=1)
        process.terminate()
        assert any("interrupt again" in line for line in iter(process.stderr.readline, ""))
        process.terminate()
        process.wait(END_SECONDS)
    wait_until_gone([rank.pid])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_end_a_page_whose_processes_do_not_answer(number):
    with running(*MMVLLM, "demo", "--port", "0", "--device", "cpu", "--data-parallel-size", "2") as process:
        assert "(Ctrl-C ends it)" in process.stdout.readline()
        processes = spawned(process.pid)
        assert len(processes) > 2  # engines and decoders
        for each in processes:
            each.suspend()
        begin = time.monotonic()
        while process.poll() is None:  # two that come at the same time are one
            process.send_signal(number)
            time.sleep(0.2)
        assert time.monotonic() - begin < END_SECONDS
    wait_until_gone([each.pid for each in processes])
