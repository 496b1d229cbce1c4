"""Steps of the run: processes with a time limit, whose result is recorded even if they fail."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from mmvllm.processes.signals import signals_deferred

ROOT = Path(__file__).resolve().parents[3]
KEPT_CHARACTERS = 6000  # at the end of the output


@dataclass(frozen=True)
class RunStep:
    """A command of the run.

    Args:
        needs: Python packages that the command requires.
        may_be_refused: whether exit code 2 (wrong usage) means that this version lacks the measured feature.
        junit: the file to which pytest writes its results.
    """

    name: str
    command: list[str]
    needs: tuple[str, ...] = ()
    may_be_refused: bool = False
    junit: Path | None = None
    env: dict[str, str] = field(default_factory=dict)


def run_step(step: RunStep, seconds: float, logs: Path) -> dict:
    """Run a step for at most `seconds`; return its "status", "seconds" and "command".

    The status is "ok", "failed", "time limit", or "not available". "result" and "output" are added if the step ran, and
    "reason" unless it is "ok".
    """
    missing = [name for name in step.needs if find_spec(name) is None]
    record = {"command": " ".join(step.command), "seconds": 0.0}
    if missing:
        return record | {"status": "not available", "reason": f"{', '.join(missing)} is not installed"}
    out, err = (logs / f"{step.name}.{kind}" for kind in ("out", "err"))
    start = time.monotonic()
    code = _finish(step, seconds, out, err)
    record["seconds"] = round(time.monotonic() - start, 1)
    text, errors = (path.read_text(errors="replace") for path in (out, err))
    record |= {"result": _result(step, text), "output": (text + errors)[-KEPT_CHARACTERS:]}
    if code == 0:
        return record | {"status": "ok"}
    if code is None:
        return record | {"status": "time limit", "reason": f"not finished after {seconds:.0f} s"}
    if step.may_be_refused and code == 2:
        return record | {"status": "not available", "reason": " ".join(errors.split())[-300:]}
    return record | {"status": "failed", "reason": f"exit code {code}: {_last_line(errors) or _last_line(text)}"}


def _finish(step: RunStep, seconds: float, out: Path, err: Path) -> int | None:
    """Return the exit code, or None after the time limit; end the process and its children in any case."""
    paths = [str(ROOT), str(ROOT / "examples/benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    env = os.environ | own | step.env
    process = None
    with out.open("wb") as stdout, err.open("wb") as stderr:
        try:
            # A new process group can be ended as a whole; it stays in this session, with which it ends.
            with signals_deferred():  # an exception inside Popen would lose the process that it has started
                process = subprocess.Popen(
                    step.command, cwd=ROOT, env=env, stdout=stdout, stderr=stderr, process_group=0
                )
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process is not None:
                _end(process)


def _end(process: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(5)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _result(step: RunStep, text: str) -> dict | None:
    """Return the JSON object in the last line of the output, or the counts of pytest."""
    if step.junit is not None:
        return _tests(step.junit) if step.junit.is_file() else None
    last = _last_line(text)
    try:
        return json.loads(last) if last.startswith("{") else None
    except ValueError:  # the process was ended while it wrote the line
        return None


def _tests(path: Path) -> dict:
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    failed = [
        {"test": f"{case.get('classname')}::{case.get('name')}", "message": problem.get("message", "")[:500]}
        for suite in suites
        for case in suite.iter("testcase")
        for problem in case
        if problem.tag in ("failure", "error")
    ]
    return counts | {"failed": failed}


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def python(*arguments: object) -> list[str]:
    return [sys.executable, *map(str, arguments)]
