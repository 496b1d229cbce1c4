"""`mmvllm bench`: what is done in a second, beside what the machine could do and what transformers does."""

import argparse
from importlib import import_module
from pathlib import Path

from mmvllm.cli.common import add_model_argument, at_least_one
from mmvllm.cli.engine_options import add_engine_arguments

EPILOG = "The last line printed is one JSON object: the machine, versions, commit, model, arguments and all results."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for add in (_add_throughput, _add_latency, _add_preprocess, _add_kernels):
        benchmark = add(benchmarks)
        benchmark.epilog = EPILOG
        benchmark.add_argument("--output", type=Path, metavar="FILE", help="append the JSON line to this file, too")


def run(args: argparse.Namespace) -> int:
    for name in ("output", "plot"):
        path = getattr(args, name, None)
        if path and not path.parent.is_dir():
            raise ValueError(f"--{name} {path}: there is no folder {path.parent}; make it first")
        if path:
            path.open("ab").close()  # what cannot be written is better known now than after the last round
    record = import_module(f"mmvllm.bench.{args.benchmark}").run(args)
    import_module("mmvllm.bench.report").emit(record, args.output)
    return 0


def _add_throughput(benchmarks) -> argparse.ArgumentParser:
    parser = _add(
        benchmarks,
        "throughput",
        "many requests, as fast as they go",
        "Every picture is another, so that no cache helps, and is handed over as a JPEG file in memory. "
        "Preparing them is inside the clock; a round of other requests before it, which warms up, is not. A step with "
        "any token of a prompt in it counts as prefill. The time to the first token counts from a request's arrival "
        "in the engine, where as many wait as run.",
    )
    _add_engine_arguments(parser)
    parser.add_argument("--requests", type=at_least_one, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--max-num-seqs",
        "--concurrency",
        type=at_least_one,
        default=16,
        metavar="N",
        help="requests that run at once (default: %(default)s)",
    )
    _add_workload_arguments(parser)
    parser.add_argument("--text-share", type=share, default=0.0, metavar="SHARE", help="of requests without a picture")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the last repeat, step by step")
    return parser


def _add_latency(benchmarks) -> argparse.ArgumentParser:
    parser = _add(
        benchmarks,
        "latency",
        "a batch of requests at once: how long each waits",
        "Every request has a picture of its own, handed over as a JPEG file in memory. Times count from the call, "
        "preparation included; the first round of each batch size warms up. A step with any token of a prompt in it "
        "counts as prefill.",
    )
    _add_engine_arguments(parser)
    parser.add_argument("--batch-sizes", type=_batch_sizes, default="1,4,8", metavar="N,N", help="default: %(default)s")
    parser.add_argument(
        "--max-num-seqs", type=at_least_one, metavar="N", help="requests that run at once (default: the largest batch)"
    )
    _add_workload_arguments(parser)
    return parser


def _add_preprocess(benchmarks) -> argparse.ArgumentParser:
    parser = _add(
        benchmarks,
        "preprocess",
        "pictures made ready for the model, by size, format and threads",
        "From a file in memory to the model's patches: mmvllm's as bytes, which the device normalises later, "
        "transformers' as normalised float32.",
    )
    add_model_argument(parser)
    sizes, formats = "448x448,1024x768,4000x3000", "jpeg,png,webp"
    parser.add_argument("--sizes", default=sizes, metavar="WxH,WxH", help="default: %(default)s")
    parser.add_argument("--formats", default=formats, metavar="NAME,NAME", help="default: %(default)s")
    parser.add_argument("--workers", type=at_least_one, metavar="N", help="most threads (default: as requests get)")
    parser.add_argument(
        "--pictures", type=at_least_one, default=16, metavar="N", help="in one measurement (default: %(default)s)"
    )
    _add_comparison(parser)
    return parser


def _add_kernels(benchmarks) -> argparse.ArgumentParser:
    parser = _add(
        benchmarks,
        "kernels",
        "each Triton kernel beside its plain torch twin",
        "Median times, at the shapes of the model's config. Kernels need CUDA: on a CPU only the twins are timed.",
    )
    parser.add_argument("names", nargs="*", metavar="FILE", help="only those in these files of kernels/ (default: all)")
    add_model_argument(parser)
    add_engine_arguments(parser, only=("device", "dtype"), device="auto", dtype="auto")
    return parser


def _add(benchmarks, name: str, summary: str, details: str) -> argparse.ArgumentParser:
    return benchmarks.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {details}")


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, except those that each benchmark describes itself."""
    add_model_argument(parser)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of images, texts and weights (default: %(default)s)",
    )
    add_engine_arguments(parser.add_argument_group("engine"), exclude=("max_num_seqs", "seed"))


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size",
        default="448x448",
        metavar="WxH",
        help='of the pictures; several with commas between take turns, as do those of "mixed" (default: %(default)s)',
    )
    parser.add_argument(
        "--prompt-tokens",
        type=at_least_one,
        default=4,
        metavar="N",
        help="of text in a request, beside picture and chat template (default: %(default)s)",
    )
    parser.add_argument(
        "--output-tokens", type=at_least_one, default=33, metavar="N", help="in every answer (default: %(default)s)"
    )
    _add_comparison(parser)


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeat", type=at_least_one, default=3, metavar="N", help="take the median of N runs (default: %(default)s)"
    )
    parser.add_argument("--compare", choices=("transformers",), help="do the same with it, in turns")


def _batch_sizes(text: str) -> list[int]:
    return [at_least_one(size) for size in text.split(",")]


def share(text: str) -> float:
    """An argparse type; its name is in argparse's message about what is no number."""
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return float(text)
