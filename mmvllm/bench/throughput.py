"""`mmvllm bench throughput`: throughput of many requests, and a plot of its steps and requests."""

import argparse
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

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
    """Print the tables and return the record."""
    if args.plot:
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


def require_matplotlib() -> None:
    """Raise ValueError if matplotlib is not installed; called before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; pip install 'mmvllm[bench]'")


def plot(run: Run, path: Path) -> None:
    """Write a plot of the run as a PNG, regardless of the file's extension."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (tokens, blocks, requests) = pyplot.subplots(3, sharex=True, figsize=(10, 9), layout="constrained")
    _draw_tokens(tokens, run)
    _draw_blocks(blocks, run)
    _draw_requests(requests, run)
    for axes in (tokens, blocks, requests):
        axes.grid(alpha=0.3)
    requests.set_xlim(0, run.seconds)
    requests.set_xlabel("seconds since the requests were submitted")
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)


def _draw_tokens(axes, run: Run) -> None:
    for kind, marker in (("prefill", "s"), ("decode", ".")):
        steps = [(end, getattr(step, f"num_{kind}_tokens")) for end, step in zip(_ends(run), run.steps, strict=True)]
        axes.plot(*zip(*((end, tokens) for end, tokens in steps if tokens), strict=True), marker, label=kind)
    axes.set_yscale("log")  # a prefill step computes thousands of tokens, a decode step a few
    axes.set_ylabel("tokens in a step")
    axes.set_title(f"{counted(len(run.outputs), 'request')} in {run.seconds:.2f} s, {counted(len(run.steps), 'step')}")
    axes.legend(loc="upper right")


def _draw_blocks(axes, run: Run) -> None:
    used = [step.num_used_blocks for step in run.steps]
    axes.fill_between(_ends(run), used, step="post", alpha=0.4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("KV blocks in use")


def _draw_requests(axes, run: Run) -> None:
    outputs = sorted(run.outputs, key=lambda output: output.arrival_time)
    rows = range(1, len(outputs) + 1)
    for label, begin, end in (
        ("until the first token", "arrival_time", "first_token_time"),
        ("until the last token", "first_token_time", "finish_time"),
    ):
        begins = [getattr(output, begin) - run.start for output in outputs]
        ends = [getattr(output, end) - run.start for output in outputs]
        axes.barh(rows, [end - begin for begin, end in zip(begins, ends, strict=True)], 0.8, begins, label=label)
    axes.invert_yaxis()
    axes.set_ylabel("request, by arrival")
    axes.legend(loc="upper right")


def _ends(run: Run) -> list[float]:
    return [step.end - run.start_counter for step in run.steps]
