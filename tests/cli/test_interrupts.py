"""Ctrl-C while a command starts ends it without a traceback, whatever is being imported."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mmvllm import __main__

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
COMMANDS = {
    "caption": ["caption", "examples/images"],
    "serve": ["serve", "--port", "0"],
    "demo": ["demo"],
    "bench": ["bench", "latency"],
    "info": ["info"],
}


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
