"""Tests and measurements for a GPU on which mmvllm has not run before, in one command.

    python examples/benchmarks/first_gpu_run.py
    python examples/benchmarks/first_gpu_run.py --minutes 9 --stages decode,latency --again failed

Every step is a process with a time limit, and its result is written as soon as it is known: results.json has all
results, table.md the most important ones, and each stage has a file with its results. A failed step ends neither the
run nor its stage. Steps with a result are not repeated, so the same command continues an interrupted run. The model has
the sizes of Qwen2-VL-2B and 7B and random weights.
"""

import argparse
import platform
import signal
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpu_run.checkpoints import write_checkpoint
from gpu_run.record import UNFINISHED, RunRecord
from gpu_run.stages import Stage, stages
from gpu_run.steps import run_step

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-4", "pytest", "pytest-xdist")
LEAST_SECONDS = 10.0  # with less time left, no step begins


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    for name in ("checkpoints", "logs"):
        (args.output / name).mkdir(parents=True, exist_ok=True)
    for size in ("2B", "7B"):
        write_checkpoint(args.output / "checkpoints" / size, "bundled" if args.small else size)
    record = RunRecord(args.output)
    record.results["environment"] = _environment()
    for stage in args.stages:
        if args.again:
            record.forget(stage, only_failed=args.again == "failed")
    record.write()
    end = time.monotonic() + 60 * args.minutes
    for stage in args.stages:
        _run_stage(stage, record, end)
    print((args.output / "table.md").read_text())
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--output", type=Path, default=Path("build/gpu-run"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--minutes", type=float, default=25, help="minutes for the whole run (default: %(default)s)")
    parser.add_argument("--stages", metavar="NAME,NAME", help="default: all; a wrong name lists them")
    parser.add_argument("--again", choices=("failed", "all"), help="repeat steps of these stages that have a result")
    parser.add_argument("--small", action="store_true", help="use a CPU and the bundled model, to test this program")
    args = parser.parse_args(argv)
    args.output = args.output.resolve()
    known = {stage.name: stage for stage in stages(args.output, args.small)}
    names = args.stages.split(",") if args.stages else [*known]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no stage {unknown[0]!r}; known: {', '.join(known)}")
    args.stages = [known[name] for name in names]
    return args


def _run_stage(stage: Stage, record: RunRecord, end: float) -> None:
    """Run the steps that have no result, within the limits of the stage and of the run."""
    stage_end = time.monotonic() + 60 * stage.minutes
    for step in stage.steps:
        if record.has(stage, step.name):
            continue
        now = time.monotonic()
        seconds = min(end, stage_end) - now
        if seconds < LEAST_SECONDS:
            status = UNFINISHED if end <= stage_end else "time limit"
            result = {"status": status, "seconds": 0.0, "reason": "not begun: no time was left"}
        else:
            print(f"{stage.name}: {step.name}, at most {seconds:.0f} s", flush=True)
            result = run_step(step, seconds, record.output / "logs")
            if result["status"] == "time limit" and end <= stage_end:
                result["status"] = UNFINISHED
        record.add(stage, step.name, result)
        print(f"  {result['status']} after {result['seconds']:.0f} s. {result.get('reason', '')}", flush=True)


def _environment() -> dict[str, str | None]:
    """Return the device and the versions, for the head of the table."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    found: dict[str, str | None] = {"device": device, "python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exiting ends the step that runs
    sys.exit(main())
