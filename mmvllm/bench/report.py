"""The output of a benchmark: tables, and finally one JSON line that also records the environment."""

import argparse
import json
import os
import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import mmvllm
from mmvllm.bench.costs import ModelCosts
from mmvllm.config import ModelConfig


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table; the first column, headed by the title, is aligned left, all others right."""
    lines = [[title, *header], *([f"  {name}", *cells] for name, *cells in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *cells in lines:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print("  ".join([name.ljust(widths[0]), *aligned]).rstrip())


def number(value: float | None, factor: float = 1.0) -> str:
    """Format `factor` times the value with at least three significant digits; None is a dash."""
    if value is None:
        return "-"
    value *= factor
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def record(args: argparse.Namespace, device: torch.device, config: ModelConfig | None, **parts: Any) -> dict:
    """Return the JSON line: arguments, hardware, versions, commit, model, and the `parts` of the benchmark itself."""
    return {
        "benchmark": args.benchmark,
        "arguments": {name: value for name, value in vars(args).items() if name not in ("command", "benchmark")},
        "hardware": _hardware(device),
        "versions": versions("torch", "transformers", "triton"),
        "commit": _commit(),
        "model": config and _shape(config),
        **parts,
    }


def emit(result: dict, output: Path | None) -> None:
    """Print the result as one JSON line, and append it to `output` if given."""
    line = json.dumps(result, default=str)
    print(line)
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            print(line, file=file)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _shape(config: ModelConfig) -> dict:
    named = asdict(config) | {"eos_token_ids": sorted(config.eos_token_ids)}
    return named | {"parameters": ModelCosts(config).num_parameters}


def _hardware(device: torch.device) -> dict:
    on_cuda = device.type == "cuda"
    return {
        "device": device.type,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": torch.cuda.get_device_name(device) if on_cuda else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_cuda else None,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of mmvllm, Python and these packages; None for a package that is not installed."""
    found = {"mmvllm": mmvllm.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    """Return the commit of the checkout that this package runs from, followed by -dirty if files were changed."""
    root = Path(mmvllm.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None
