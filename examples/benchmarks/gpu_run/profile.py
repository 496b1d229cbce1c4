"""Profiles decode steps of batches of several sizes with torch.profiler.

    python -m gpu_run.profile FOLDER --batch-sizes 1,8,64,256

The last line has, for each batch size, the operators that took the most time, and the table as text.
"""

import argparse
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mmvllm import LLM, SamplingParams
from mmvllm.bench.workload import Workload

STEPS = 10
WARM_UP_STEPS = 5
ROWS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch-sizes", default="1,8,64,256")
    parser.add_argument("--size", type=int, default=448, help="width and height of the image of each request")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    results = {}
    with LLM(args.folder, load_format="dummy", dtype=args.dtype, max_num_seqs=max(sizes)) as llm:
        workload = Workload(llm.tokenizer, sizes=[(args.size, args.size)], prompt_tokens=4)
        for size in sizes:
            results[size] = _profile(llm, workload, size)
            print(f"batch of {size}\n{results[size]['table']}", flush=True)
    print(json.dumps({"results": results}))


def _profile(llm: LLM, workload: Workload, size: int) -> dict:
    """Profile steps in which all requests decode."""
    engine = llm.engine
    params = SamplingParams(max_tokens=1 + WARM_UP_STEPS + STEPS + 8, ignore_eos=True)
    groups = [engine.add(llm.processor(request), params) for request in workload.requests(size)]
    while not all(group.has_begun for group in groups) or engine.scheduler.waiting:
        engine.step()
    _steps(engine, WARM_UP_STEPS)
    on_cuda = engine.model_runner.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        _steps(engine, STEPS)
        if on_cuda:
            torch.cuda.synchronize()
    for group in groups:
        if group.output is None:
            engine.abort_request(group.request_id)
    return _summary(profiler, "self_device_time_total" if on_cuda else "self_cpu_time_total")


def _steps(engine, number: int) -> None:
    for _ in range(number):
        if not engine.is_finished():
            engine.step()


def _summary(profiler: profile, key: str) -> dict:
    averages = profiler.key_averages()
    longest = sorted(averages, key=lambda event: getattr(event, key), reverse=True)[:ROWS]
    rows = [{"name": event.key, "calls": event.count, "microseconds": getattr(event, key) / STEPS} for event in longest]
    return {"steps": STEPS, "per_step": rows, "table": averages.table(sort_by=key, row_limit=ROWS)}


if __name__ == "__main__":
    main()
