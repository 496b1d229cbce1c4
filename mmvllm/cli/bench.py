"""`mmvllm bench`: throughput and latency, also of other engines, and the cost of single parts."""

import argparse
from importlib import import_module
from pathlib import Path

from mmvllm.cli.checks import check
from mmvllm.cli.common import add_model_argument, at_least_one, option_name, output_file, whole_number
from mmvllm.cli.options import add_options
from mmvllm.config import EngineConfig

CONVERSION = "optimum-cli export openvino --task image-text-to-text --weight-format fp16 --model MODEL FOLDER"
EPILOG = "The last line of output is a JSON object with the machine, versions, commit, model, arguments and results."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for add in (_add_throughput, _add_latency, _add_preprocess, _add_kernels, _add_host):
        benchmark = add(benchmarks)
        benchmark.epilog = EPILOG
        benchmark.add_argument(
            "--output", type=output_file, metavar="FILE", help="also append the JSON line to this file"
        )


def run(args: argparse.Namespace) -> int:
    for name in ("output", "plot", "profile"):
        path = getattr(args, name, None)
        if path and not path.parent.is_dir():
            raise ValueError(f"--{name} {path}: there is no folder {path.parent}; make it first")
        if path:
            path.open("ab").close()  # fail now, not after the last round, if the file is not writable
    _check_comparison(args)
    check(args)
    record = import_module(f"mmvllm.bench.{args.benchmark}").run(args)
    import_module("mmvllm.bench.report").emit(record, args.output)
    return 0


def _add_throughput(benchmarks) -> argparse.ArgumentParser:
    parser = _add(
        benchmarks,
        "throughput",
        "measure the throughput of many requests",
        "All images are different, so that no cache has hits, and are passed as JPEG files in memory. Measured times "
        "include their preparation, but not the warm-up round with other requests. A step that computes any prompt "
        "token counts as prefill. The time to first token is measured from a request's arrival in the engine, where "
        "as many requests wait as run.",
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
    parser.add_argument("--text-share", type=share, default=0.0, metavar="SHARE", help="share of text-only requests")
    parser.add_argument("--plot", type=output_file, metavar="FILE.png", help="plot the last repeat, step by step")
    return parser


def _add_latency(benchmarks) -> argparse.ArgumentParser:
    parser = _add(
        benchmarks,
        "latency",
        "measure the latency of batches of requests",
        "Every request has its own image, passed as a JPEG file in memory. Times are measured from the call and "
        "include preparation; the first round of each batch size is a warm-up. A step that computes any prompt token "
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
        "measure image preprocessing by size, format and number of threads or processes, or the reading of a video",
        "Times are from a file in memory to the model's patches: bytes for mmvllm, which the device normalizes "
        "later, and normalized float32 for transformers. With --video: the cost of a sampled frame, beside readers "
        "that decode the whole video, PyAV and OpenCV.",
    )
    add_model_argument(parser)
    sizes, formats = "448x448,1024x768,4000x3000", "jpeg,png,webp"
    parser.add_argument("--sizes", default=sizes, metavar="WxH,WxH", help="default: %(default)s")
    parser.add_argument("--formats", default=formats, metavar="NAME,NAME", help="default: %(default)s")
    parser.add_argument(
        "--workers",
        type=at_least_one,
        metavar="N",
        help="maximum number of threads (default: the engine's)",
    )
    parser.add_argument(
        "--processes",
        type=at_least_one,
        default=0,
        metavar="N",
        help="also measure up to N worker processes, as with the --worker-processes of mmvllm caption",
    )
    parser.add_argument(
        "--images", type=at_least_one, default=16, metavar="N", help="images per measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--video",
        nargs="?",
        type=Path,
        const=True,
        metavar="FILE",
        help="measure a video instead of images: FILE, or a generated clip of 20 s",
    )
    parser.add_argument(
        "--video-fps",
        type=rates,
        default="2,0.2",
        metavar="N,N",
        help="frames sampled per second of the video (default: %(default)s)",
    )
    _add_comparison(parser)
    return parser


def _add_kernels(benchmarks) -> argparse.ArgumentParser:
    parser = _add(
        benchmarks,
        "kernels",
        "compare each Triton kernel with its torch reference",
        "Median times, at the shapes of the model's config. Kernels need CUDA: on a CPU only the references are timed.",
    )
    parser.add_argument("names", nargs="*", metavar="FILE", help="files of kernels/ to measure (default: all)")
    add_model_argument(parser)
    add_options(parser, EngineConfig, ("device", "dtype"), device="auto", dtype="auto")
    return parser


def _add_host(benchmarks) -> argparse.ArgumentParser:
    parser = _add(
        benchmarks,
        "host",
        "measure the host's work in each step",
        "The model is replaced by prepared logits: scheduler, batch, sampler, commit and delivery remain. Times are "
        "microseconds per step, the lowest of the medians of three rounds: wall-clock time, and CPU time of the "
        "engine's thread, which other processes change little. The parts are CPU time too, measured in separate "
        "steps. In mixed steps one prompt arrives and one request finishes.",
    )
    parser.set_defaults(model=None)
    exclude = ("max_num_seqs", "max_model_len", "load_format", "skip_warmup")
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=exclude)
    for name, default in (("sequences", "1,8,64,256"), ("contexts", "300,4000")):
        parser.add_argument(f"--{name}", type=_batch_sizes, default=default, metavar="N,N", help="default: %(default)s")
    for name, default in (("sampling", "greedy,top_p,penalties"), ("kinds", "decode,mixed")):
        parser.add_argument(f"--{name}", default=default, metavar="NAME,NAME", help="default: %(default)s")
    parser.add_argument(
        "--steps", type=at_least_one, default=60, metavar="N", help="measured steps of each case (default: %(default)s)"
    )
    parser.add_argument(
        "--streams",
        type=whole_number,
        default=256,
        metavar="N",
        help="streams of an AsyncLLM, at the shortest context; 0 skips this measurement (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab-size",
        type=at_least_one,
        metavar="N",
        help="columns of the logits (default: 768 on a CPU, 151936 on a GPU)",
    )
    parser.add_argument(
        "--arithmetic",
        action="store_true",
        help="run the sampler's kernels on a CPU, too; by default they are replaced there, like the model",
    )
    parser.add_argument(
        "--profile",
        type=output_file,
        metavar="FILE",
        help="profile the decode steps: a table in FILE.txt, or a pstats file",
    )
    return parser


def _add(benchmarks, name: str, summary: str, details: str) -> argparse.ArgumentParser:
    return benchmarks.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {details}")


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's options, except those that each benchmark describes itself."""
    add_model_argument(parser)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of images, texts and weights (default: %(default)s)",
    )
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=("max_num_seqs", "seed"))


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size",
        default="448x448",
        metavar="WxH",
        help='image size, a comma-separated list of sizes used in turn, or "mixed" (default: %(default)s)',
    )
    parser.add_argument(
        "--prompt-tokens",
        type=at_least_one,
        default=4,
        metavar="N",
        help="text tokens per request, without image and chat template (default: %(default)s)",
    )
    parser.add_argument(
        "--output-tokens",
        type=at_least_one,
        default=33,
        metavar="N",
        help="tokens of every completion (default: %(default)s)",
    )
    _add_comparison(parser, "openvino")
    parser.add_argument(
        "--openvino-model",
        type=Path,
        metavar="FOLDER",
        help="the model as `optimum-cli export openvino --task image-text-to-text` has converted it, with "
        "`--weight-format fp16` or int8; required with --compare openvino",
    )
    parser.add_argument(
        "--openvino-python",
        metavar="FILE",
        help="interpreter of an environment with openvino-genai and Pillow (default: mmvllm's interpreter)",
    )


def _add_comparison(parser: argparse.ArgumentParser, *others: str) -> None:
    parser.add_argument(
        "--repeat", type=at_least_one, default=3, metavar="N", help="report the median of N runs (default: %(default)s)"
    )
    parser.add_argument("--compare", choices=("transformers", *others), help="also run this engine, in turns")


def _check_comparison(args: argparse.Namespace) -> None:
    """Raise ValueError for wrong options of OpenVINO, which some benchmarks do not have."""
    if getattr(args, "compare", None) != "openvino":
        if given := [name for name in ("openvino_model", "openvino_python") if getattr(args, name, None)]:
            raise ValueError(f"{option_name(given[0])} needs --compare openvino")
        return
    needed = f"a folder that `{CONVERSION}` (or int8) has written"
    if args.openvino_model is None:
        raise ValueError(f"--compare openvino needs --openvino-model, {needed}")
    if not (args.openvino_model / "openvino_language_model.xml").is_file():
        raise ValueError(f"--openvino-model {args.openvino_model} has no openvino_language_model.xml; give {needed}")


def rates(text: str) -> list[float]:
    """Parse a list of rates; argparse has this function's name in its error message."""
    given = [float(rate) for rate in text.split(",")]
    if not all(0 < rate <= 1000 for rate in given):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers above 0 and at most 1000")
    return given


def _batch_sizes(text: str) -> list[int]:
    return [at_least_one(size) for size in text.split(",")]


def share(text: str) -> float:
    """Parse a share; argparse has this function's name in its error message."""
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return float(text)
