"""`mmvllm bench throughput`: throughput of many requests."""

import argparse
from contextlib import ExitStack

from mmvllm.bench import measures
from mmvllm.bench.report import number, percent, print_table, record
from mmvllm.bench.runs import Run
from mmvllm.bench.setup import Bench
from mmvllm.utils.text import counted

LATENCIES = {
    "first_token_seconds": "time to first token",
    "seconds_per_output_token": "time per output token",
    "request_seconds": "whole request",
}
PHASES = {
    "waiting_for_preparation": "waiting for preparation",
    "vision": "ViT",
    "prefill": "prefill",
    "decode": "decode",
    "sampling": "sampling",
    "scheduling": "scheduling",
    "other": "other",
}


def run(args: argparse.Namespace) -> dict:
    """Print the tables; return the record."""
    if args.plot:
        from mmvllm.bench.plot import plot, require_matplotlib

        require_matplotlib()
    with ExitStack() as stack:
        bench = Bench.open(args, args.max_num_seqs, stack)
        rounds = bench.rounds(args.repeat, args.requests, args.output_tokens)
    repeats = [{name: _measure(one, bench) for name, one in runs.items()} for runs in rounds]
    results = measures.medians(repeats)
    if args.compare:
        results["ratio"] = measures.ratios(results, args.compare)
    _print(results, args)
    if args.plot:
        plot(rounds[-1]["mmvllm"], args.plot)
    return record(args, bench.device, bench.config, **bench.described(), results=results, repeats=repeats)


def _measure(one: Run, bench: Bench) -> dict:
    measured = measures.counts_and_rates(one)
    if not one.steps:  # another engine, whose queue is not comparable
        return measured
    return {
        **measured,
        **measures.latencies(one),
        "phase_seconds": measures.phases(one),
        "worker_seconds": one.worker_seconds,
        **measures.hit_rates(one),
        "roofline": measures.shares_of_machine(one, bench.roofline, bench.max_num_seqs),
    }


def _print(results: dict, args: argparse.Namespace) -> None:
    result = results["mmvllm"]
    num_requests, num_images = result["requests"], result["images"]
    print(
        f"{counted(round(num_requests), 'request')}, {args.max_num_seqs} at a time, {num_images:.0f} with a JPEG image "
        f"({args.size}); {result['input_tokens'] / num_requests:.1f} tokens in, {args.output_tokens} out; "
        f"median of {args.repeat}"
    )
    rates = {f"{name}_per_second": f"{name.replace('_', ' ')}/s" for name in measures.RATES}
    columns = results.values()
    print_table(
        "rates", list(results), [[label, *(number(column[key]) for column in columns)] for key, label in rates.items()]
    )
    latencies = [[label, *(number(value, 1000) for value in result[key].values())] for key, label in LATENCIES.items()]
    print_table("milliseconds", ["p50", "p90", "p99"], latencies)
    _print_phases(result)


def _print_phases(result: dict) -> None:
    roofline = result["roofline"]
    reached = {
        "vision": f"{percent(roofline['vision_of_arithmetic'])} of arithmetic",
        "prefill": f"{percent(roofline['prefill_of_arithmetic'])} of arithmetic",
        "decode": f"{percent(roofline['decode_of_bandwidth'])} of bandwidth ",
    }
    rows = [
        [label, number(seconds), percent(seconds / result["seconds"]), reached.get(name, "")]
        for name, label in PHASES.items()
        for seconds in [result["phase_seconds"][name]]
    ]
    print_table("time", ["seconds", "share", "of the peak"], rows)
    print(
        f"preparation took {number(result['worker_seconds'])} s of CPU time in its threads, "
        f"{percent(result['worker_seconds'] / result['seconds'])} of the run"
    )
    print(
        f"hits: prefix cache {percent(result['prefix_cache_hit_rate'])} of tokens, "
        f"encoder cache {percent(result['encoder_cache_hit_rate'])} of images; "
        f"peak memory of all loaded models {number(result['peak_memory_bytes'], 2**-20)} MiB"
    )
    print(
        f"the machine's limit: {number(roofline['limit_requests_per_second'])} requests/s, "
        f"{number(roofline['limit_images_per_second'])} images/s; reached {percent(roofline['share_of_limit'])}"
    )
