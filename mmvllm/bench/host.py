"""`mmvllm bench host`: the host's work in each step, with a model that launches nothing."""

import argparse
import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from cProfile import Profile
from dataclasses import asdict
from itertools import product
from pathlib import Path
from pstats import Stats
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmvllm.bench.host_engine import SAMPLING, HostCase, StandIn, engine_options, write_checkpoint
from mmvllm.bench.host_steps import HostTimes, measure_steps, num_filling_steps
from mmvllm.bench.host_streams import SPARE_STEPS, measure_streams
from mmvllm.bench.report import number, print_table, record
from mmvllm.config import EngineConfig, given_engine_args
from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.models.registry import load_config

KINDS = ("decode", "mixed")
VOCAB_SIZES = {"cpu": 768, "cuda": 151_936}  # defaults; small on a CPU, where the sampler's arithmetic must cost little


def run(args: argparse.Namespace) -> dict:
    """Print the tables and return the record."""
    cases, streamed = _cases(args)
    device = EngineConfig(device=args.device or "auto").resolve_device()
    args.vocab_size = args.vocab_size or VOCAB_SIZES[device.type]
    profile = Profile() if args.profile else None
    with TemporaryDirectory() as name, _one_thread():
        folder, all_cases = Path(name), cases + streamed
        max_model_len = max(_length(case, args.steps) for case in all_cases)
        write_checkpoint(folder, args.vocab_size, max_model_len, args.tensor_parallel_size or 1)
        options = engine_options(max(case.sequences for case in all_cases), given_engine_args(vars(args)))
        arithmetic = args.arithmetic or device.type == "cuda"  # where it consists of launches
        steps = _measure_steps(folder, options, cases, args.steps, arithmetic, profile)
        streams = []
        if streamed:
            streams = asyncio.run(_measure_streams(folder, options, streamed, args.steps, arithmetic))
        config = load_config(folder)
    _print("microseconds per step", steps)
    if streams:
        _print("with AsyncLLM, all streamed", streams)
    if profile is not None:
        _write_profile(profile, args.profile)
    return record(args, device, config, steps=steps, **{"async": streams})


def _cases(args: argparse.Namespace) -> tuple[list[HostCase], list[HostCase]]:
    """Return the cases for the engine and for `AsyncLLM`."""
    sampling, kinds = _chosen("sampling", args.sampling, SAMPLING), _chosen("kinds", args.kinds, KINDS)
    cases = [HostCase(*one) for one in product(args.sequences, args.contexts, sampling, kinds)]
    # With several ranks, the engine of `AsyncLLM` is in another process, where the model cannot be replaced.
    has_streams = args.streams and (args.tensor_parallel_size or 1) == 1
    streamed = [HostCase(args.streams, min(args.contexts), name, "decode") for name in sampling if has_streams]
    return cases, streamed


def _chosen(option: str, text: str, known: Iterable[str]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--{option} has {unknown[0]!r}; known: {', '.join(known)}")
    return names


def _length(case: HostCase, steps: int) -> int:
    """Return the tokens of the longest sequence in either measurement."""
    return case.context + num_filling_steps(case) + case.sequences + SPARE_STEPS + 3 * steps


def _measure_steps(
    folder: Path,
    options: dict[str, Any],
    cases: list[HostCase],
    steps: int,
    arithmetic: bool,
    profile: Profile | None,
) -> list[dict]:
    engine = LLMEngine(folder, **options)
    model = StandIn(engine, arithmetic)
    try:
        return [_result(case, measure_steps(engine, model, case, steps, profile)) for case in cases]
    finally:
        model.close()
        engine.exit()


async def _measure_streams(
    folder: Path, options: dict[str, Any], cases: list[HostCase], steps: int, arithmetic: bool
) -> list[dict]:
    async with AsyncLLM(folder, **options) as engine:
        model = StandIn(engine._engine, arithmetic)
        try:
            return [_result(case, await measure_streams(engine, model, case, steps)) for case in cases]
        finally:
            model.close()


def _result(case: HostCase, times: HostTimes) -> dict:
    """Return the result for the JSON line."""
    return asdict(case) | {
        "microseconds": _microseconds(times.seconds),
        "cpu_microseconds": _microseconds(times.cpu_seconds),
        "parts": {name: _microseconds(seconds) for name, seconds in times.parts.items()},
        "tokens": times.num_tokens,
    }


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def _print(title: str, results: list[dict]) -> None:
    names = list(dict.fromkeys(name for result in results for name in result["parts"]))
    rows = []
    for result in results:
        label = f"{result['sequences']} x {result['context']} {result['sampling']} {result['kind']}"
        values = [result["microseconds"], result["cpu_microseconds"], *(result["parts"].get(name) for name in names)]
        rows.append([label, *map(number, values)])
    print_table(title, ["step", "CPU", *names], rows)


def _write_profile(profile: Profile, path: Path) -> None:
    """Write a table if the file's name ends with .txt, otherwise the format of pstats and its viewers."""
    if path.suffix != ".txt":
        profile.dump_stats(path)
        return
    with path.open("w", encoding="utf-8") as file:
        Stats(profile, stream=file).strip_dirs().sort_stats("tottime").print_stats(60)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, which computes the sampler's small tensors faster."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
