"""`mmvllm bench latency`: latency of requests that are submitted as one batch."""

import argparse
from contextlib import ExitStack
from statistics import median

from mmvllm.bench import measures
from mmvllm.bench.report import number, percent, print_table, record
from mmvllm.bench.runs import Run, is_prefill, step_seconds
from mmvllm.bench.setup import Bench

SHARES = {
    "decode_of_bandwidth": "bandwidth in decode",
    "prefill_of_arithmetic": "arithmetic in prefill",
    "vision_of_arithmetic": "in the ViT",
    "share_of_limit": "limit of requests/s",
}


def run(args: argparse.Namespace) -> dict:
    """Print the tables and return the record."""
    results, repeats = {}, {}
    with ExitStack() as stack:
        bench = Bench.open(args, args.max_num_seqs or max(args.batch_sizes), stack)
        for batch_size in args.batch_sizes:
            rounds = bench.rounds(args.repeat, batch_size, args.output_tokens)
            repeats[batch_size] = [{name: _measure(one, bench) for name, one in runs.items()} for runs in rounds]
            results[batch_size] = measures.medians(repeats[batch_size])
            if args.compare:
                results[batch_size]["ratio"] = measures.ratios(results[batch_size], args.compare)
    _print(results, args)
    return record(args, bench.device, bench.config, **bench.described(), results=results, repeats=repeats)


def _measure(one: Run, bench: Bench) -> dict:
    measured = {**measures.counts_and_rates(one), **measures.latencies(one, since=one.start)}
    if not one.steps:  # another engine; each step of transformers generates one token per request
        seconds = median(one.decode_seconds) if one.decode_seconds else measured["seconds_per_output_token"]["p50"]
        return measured | {"decode_step_seconds": seconds}
    decode_steps = [step_seconds(step) for step in one.steps if not is_prefill(step)]
    return measured | {
        "decode_step_seconds": median(decode_steps) if decode_steps else None,
        "roofline": measures.shares_of_machine(one, bench.roofline, bench.max_num_seqs),
    }


def _print(results: dict, args: argparse.Namespace) -> None:
    print(f"requests with a JPEG image ({args.size}), {args.output_tokens} tokens out; median of {args.repeat}")
    header = ["first token ms", "decode step ms", "ms per token", "output tokens/s", "images/s"]
    rows = []
    for batch_size, engines in results.items():
        figures = {name: _figures(engines[name]) for name in engines if name != "ratio"}
        rows += [[f"{batch_size} {name}", *map(number, values)] for name, values in figures.items()]
        if args.compare:
            ratios = _times_as_fast(figures["mmvllm"], figures[args.compare])
            rows.append([f"{batch_size} times as fast", *map(number, ratios)])
    print_table("batch size", header, rows)
    print_table(
        "share of the peak",
        list(SHARES.values()),
        [
            [str(batch_size), *(percent(engines["mmvllm"]["roofline"][name]) for name in SHARES)]
            for batch_size, engines in results.items()
        ],
    )


def _figures(measured: dict) -> list[float | None]:
    """Return three times in milliseconds and two rates."""
    seconds = [measured["first_token_seconds"]["p50"], measured["decode_step_seconds"]]
    seconds.append(measured["seconds_per_output_token"]["p50"])
    return [
        *(value if value is None else 1000 * value for value in seconds),
        *(measured[f"{name}_per_second"] for name in ("output_tokens", "images")),
    ]


def _times_as_fast(ours: list[float | None], theirs: list[float | None]) -> list[float | None]:
    pairs = [*zip(theirs[:3], ours[:3], strict=True), *zip(ours[3:], theirs[3:], strict=True)]
    return [more / less if more and less else None for more, less in pairs]
