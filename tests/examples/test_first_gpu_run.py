"""The first run on a GPU: on a CPU its stages run small, and whatever becomes of a step, results are kept."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))
import first_gpu_run
from gpu_run import attention, decode, steps
from gpu_run.checkpoints import write_checkpoint
from gpu_run.stages import Stage, stages
from gpu_run.steps import RunStep, python, run_step

from mmvllm.cli.main import COMMANDS
from mmvllm.kernels import paged_attention
from mmvllm.kernels.packed_attention import tile_sizes
from mmvllm.kernels.paged_attention import paged_attention_torch
from tests.helpers.engine.async_engines import wait_until
from tests.helpers.models.configs import assert_equals_transformers
from tests.helpers.processes import wait_until_gone

JSON = "print('a line'); print('{\"number\": 3}')"


def step(code: str, name: str = "step", **options) -> RunStep:
    return RunStep(name, python("-c", code), **options)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the program with these stages instead of its stages -> the results."""

    def run(*own: Stage, arguments: tuple = ()) -> dict:
        monkeypatch.setattr(first_gpu_run, "stages", lambda output, small: own)
        assert first_gpu_run.main(["--output", str(tmp_path / "out"), "--small", *map(str, arguments)]) == 0
        results = json.loads((tmp_path / "out/results.json").read_text())
        assert (tmp_path / "out/table.md").read_text() in capsys.readouterr().out
        return {name: stage["steps"] for name, stage in results["stages"].items()}

    return run


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("code", "options", "want"),
    [
        (JSON, {}, {"status": "ok", "result": {"number": 3}}),
        (f"{JSON}; raise ValueError('no card')", {}, {"status": "failed", "result": {"number": 3}}),
        ("import os; os.kill(os.getpid(), 9)", {}, {"status": "failed", "reason": "exit code -9: "}),
        ("print('{\"numb')", {}, {"status": "ok", "result": None}),
        (
            "",
            {"needs": ("no_such_package",)},
            {"status": "not available", "reason": "no_such_package is not installed"},
        ),
        (
            "import sys; print('no fp8', file=sys.stderr); sys.exit(2)",
            {"may_be_refused": True},
            {"status": "not available", "reason": "no fp8"},
        ),
        ("import sys; sys.exit(2)", {}, {"status": "failed"}),
    ],
)
def test_what_becomes_of_a_step_is_recorded(code, options, want, tmp_path):
    got = run_step(step(code, **options), 60, tmp_path)
    assert {name: got.get(name) for name in want} == want
    if "no card" in code:
        assert got["reason"] == "exit code 1: ValueError: no card" and "Traceback" in got["output"]


@pytest.mark.slow
def test_a_step_ends_with_its_children_when_its_time_is_over(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    got = run_step(step(code), 5, tmp_path)
    assert got["status"] == "time limit" and got["reason"] == "not finished after 5 s" and got["seconds"] < 30
    wait_until_gone([int(got["output"])])


@pytest.mark.spawns
def test_a_signal_while_a_step_is_started_ends_it(tmp_path, monkeypatch):
    begun = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            begun.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(steps.subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # libraries of other tests set their own
    try:
        with pytest.raises(KeyboardInterrupt):
            run_step(step("import time; time.sleep(60)"), 60, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
    assert begun[0].poll() == -signal.SIGTERM


@pytest.mark.spawns
def test_a_failing_step_ends_neither_its_stage_nor_the_run(run):
    own = [
        Stage("a", "A", 1, [step("raise ValueError('x')", "a-1"), step(JSON, "a-2")]),
        Stage("b", "B", 1, [step(JSON)]),
    ]
    results = run(*own)
    assert [one["status"] for one in results["a"].values()] == ["failed", "ok"]
    assert results["b"]["step"]["result"] == {"number": 3}


@pytest.mark.spawns
def test_only_steps_without_a_result_are_run_again(run, tmp_path):
    log = tmp_path / "calls"
    count = f"open({str(log)!r}, 'a').write('x');"
    own = [Stage("a", "A", 1, [step(count, "good"), step(f"{count} raise ValueError", "bad")]), Stage("b", "B", 1, [])]
    calls = []
    for arguments in [(), (), ("--again", "failed"), ("--again", "all"), ("--stages", "b", "--again", "all")]:
        run(*own, arguments=arguments)
        calls.append(len(log.read_text()))
    assert calls == [2, 2, 3, 5, 5]


@pytest.mark.spawns
def test_steps_that_the_end_of_the_run_cut_off_are_run_by_the_next_one(run):
    own = [Stage("a", "A", 1, [step(JSON, "one"), step(JSON, "two")])]
    assert {one["status"] for one in run(*own, arguments=("--minutes", 0))["a"].values()} == {"out of time"}
    assert {one["status"] for one in run(*own)["a"].values()} == {"ok"}
    stage_over = [Stage("c", "C", 0, [step(JSON)])]
    assert run(*stage_over)["c"]["step"]["status"] == "time limit"


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        first_gpu_run.main(["--stages", "decode,speed"])
    assert "there is no stage 'speed'; known: kernels, engine, decode" in capsys.readouterr().err


@pytest.mark.spawns
def test_a_terminated_run_ends_its_step_and_keeps_the_results(tmp_path):
    command = [sys.executable, first_gpu_run.__file__, "--small", "--stages", "decode", "--output", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert "decode-calls, at most" in process.stdout.readline()
    wait_until(lambda: psutil.Process(process.pid).children(), "begun")
    begun = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert not psutil.wait_procs(begun, timeout=10)[1]
    assert json.loads((tmp_path / "results.json").read_text())["stages"] == {}
    assert (tmp_path / "table.md").read_text().startswith("device ")


@pytest.mark.parametrize("size", ["2B", "7B"])
def test_the_checkpoints_have_the_published_sizes(size, tmp_path):
    config = assert_equals_transformers(write_checkpoint(tmp_path, size))
    assert (config.hidden_size, config.head_dim) == ({"2B": 1536, "7B": 3584}[size], 128)
    assert config.vision.head_dim == 80 and config.dtype == torch.bfloat16


@pytest.mark.slow
def test_random_decode_calls_find_a_kernel_that_is_wrong_in_one_call_of_fifty(monkeypatch):
    """The reference in place of the kernel passes; one that misses the last token of a call, or changes, does not."""
    calls = []

    def result_of(kernel) -> dict:
        monkeypatch.setattr(decode, "paged_attention_triton", kernel)
        calls.clear()
        run = decode.RandomCalls(torch.device("cpu"), torch.float16, 200, 100, seed=0)
        for _ in range(50):
            run.once()
        return run.result(1.0)

    def misses_a_token(q, k, v, starts, lens, table, longest):
        calls.append(None)
        return paged_attention_torch(q, k, v, starts, lens - int(len(calls) in (41, 42)), table, longest)

    def differs(*args):
        calls.append(None)
        return paged_attention_torch(*args) * (1 + (len(calls) == 41) * 2**-11)

    good = result_of(paged_attention_torch)
    assert good["problem"] is None and good["calls"] == 50 and good["least_splits"] >= 2
    assert good["errors"]["num_values"] >= 10_000
    assert result_of(misses_a_token)["problem"] == "wrong calls: 1; calls that differ when they are repeated: 0"
    assert result_of(differs)["problem"] == "wrong calls: 0; calls that differ when they are repeated: 1"


def test_other_tiles_are_used_only_while_they_are_measured():
    before = paged_attention.num_splits(2, 4096, 64, torch.device("cpu"))
    with attention._replaced("MAX_SPLITS", 1), attention._replaced("tile_sizes", None):
        assert paged_attention.num_splits(2, 4096, 64, torch.device("cpu")) == 1
        assert paged_attention.tile_sizes is None and attention.packed_attention.tile_sizes is None
    assert paged_attention.num_splits(2, 4096, 64, torch.device("cpu")) == before > 1
    assert paged_attention.tile_sizes is attention.packed_attention.tile_sizes is tile_sizes


def test_every_stage_of_a_gpu_has_valid_arguments(tmp_path):
    """Commands of mmvllm exist, and files of pytest."""
    commands = [one.command for stage in stages(tmp_path, small=False) for one in stage.steps]
    assert {command[3] for command in commands if command[2] == "mmvllm"} <= COMMANDS.keys()
    files = [part for command in commands if command[2] == "pytest" for part in command if part.startswith("tests/")]
    assert files and all(Path(first_gpu_run.__file__).parents[2].joinpath(part).exists() for part in files)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        "decode,bench-kernels,throughput",
        pytest.param("kernels,engine,latency,attention,models", marks=pytest.mark.slow),
    ],
)
def test_the_stages_run_on_a_cpu(chosen, tmp_path):
    command = [sys.executable, first_gpu_run.__file__, "--small", "--output", tmp_path, "--stages", chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    results = json.loads((tmp_path / "results.json").read_text())["stages"]
    statuses = {name: one["status"] for stage in results.values() for name, one in stage["steps"].items()}
    assert done.returncode == 0 and list(results) == chosen.split(",")
    assert all(status == "ok" for name, status in statuses.items() if not name.endswith("-fp8")), done.stdout
    assert {json.loads((tmp_path / f"{name}.json").read_text())["title"] for name in results}
    quick, slow = ("random decode calls", "throughput", "kernels"), ("tests", "latency", "attention")
    for title in ("steps", *(quick if "decode" in results else slow)):
        assert f"| {title} |" in done.stdout
