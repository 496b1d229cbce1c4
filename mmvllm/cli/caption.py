"""`mmvllm caption`: writes a caption for each image and each clip of a video."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmvllm.captioning.errors import explained
from mmvllm.captioning.jobs.endpoint_options import EndpointOptions, check_endpoint
from mmvllm.captioning.jobs.ray_options import RayOptions
from mmvllm.captioning.outputs.caption_files import FILE_FORMATS
from mmvllm.captioning.outputs.output import FORMATS, check_output
from mmvllm.captioning.presets import DEFAULT_PROMPT, PRESET_SCHEMAS, PRESETS
from mmvllm.captioning.settings import ENGINE_SETTINGS, CaptionSettings
from mmvllm.captioning.sources.context import MODES as CONTEXT_MODES
from mmvllm.captioning.sources.find import find_items
from mmvllm.captioning.sources.timeouts import DEFAULT_TIMEOUTS, Timeouts
from mmvllm.cli.caption_output import Printer, as_lines, own_stdout, summarize
from mmvllm.cli.checks import check, print_bundled_notice
from mmvllm.cli.common import (
    add_model_argument,
    add_template_argument,
    at_least_one,
    seconds,
)
from mmvllm.cli.options import add_options, given_options, listed_options
from mmvllm.cli.progress import MODES, Display
from mmvllm.config import EngineConfig
from mmvllm.processes.signals import ended_by_second_signal
from mmvllm.utils.text import parse_json

if TYPE_CHECKING:
    from mmvllm.captioning.run import CaptionRun

# Arguments that are passed to `caption_images` under the same names.
PASSED_ON = (
    *("system", "max_tokens", "temperature", "seed", "min_pixels", "max_pixels", "prefix", "suffix", "trigger_word"),
    "jpeg_draft",
    "stop_on_repetition",
    *("video_fps", "video_frames", "video_max_pixels", "clip_seconds", "animations_as_clips"),
    *("context_from", "context_mode", "caption_extension", "schema", "n", "allow_special_tokens"),
    "chat_template_kwargs",
    *("beam_width", *ENGINE_SETTINGS, "output", "format", "output_dir", "overwrite", "append_anyway"),
    "skip_existing",
    *("retry_failed", "fail_fast", "limit", "shard", "workers", "worker_processes"),
    *("image_timeout", "video_timeout", "ordered", "data_parallel_size"),
)
# Options that concern the output only.
OUTPUT_OPTIONS = (
    *("format", "output_dir", "overwrite", "append_anyway", "skip_existing", "retry_failed", "caption_extension"),
)
# Arguments of fields of EndpointOptions and of RayOptions.
ENDPOINT_NAMES = {
    "url": "endpoint",
    "model": "endpoint_model",
    "timeout": "endpoint_timeout",
    "max_retries": "endpoint_retries",
}
RAY_NAMES = {"num_actors": "actors"}
# Caption settings that share their name with an engine option.
SETTINGS = (*ENGINE_SETTINGS, "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="folder (searched recursively), image, video, quoted glob pattern, .tar with images or videos, URL, or a "
        'list of them: text with one path or URL per line (.txt, or - for standard input), or .jsonl with {"image": '
        '... or "video": ..., "start": ..., "end": ..., "prompt": ..., "context": ..., "id": ...}',
    )
    add_model_argument(parser)
    _add_prompt(parser.add_argument_group("prompt and sampling"))
    _add_videos(parser.add_argument_group("videos"))
    _add_output(parser.add_argument_group("output (without --output, captions are printed)"))
    _add_selection(parser.add_argument_group("selection of images"))
    parser.add_argument("--workers", type=at_least_one, metavar="N", help="number of threads that prepare images")
    parser.add_argument(
        "--worker-processes",
        action="store_true",
        help="prepare images in processes instead of threads: for many cores and a fast GPU",
    )
    for kind, value in (("image", DEFAULT_TIMEOUTS.image), ("video", DEFAULT_TIMEOUTS.video)):
        parser.add_argument(
            f"--{kind}-timeout",
            type=seconds,
            default=value,
            metavar="S",
            help=f"seconds in which each {kind} must be downloaded or read, and decoded; it fails otherwise (default: "
            "%(default)g)",
        )
    _add_engine(parser.add_argument_group("where to run"))
    engine = parser.add_argument_group("engine")
    add_options(engine, EngineConfig, exclude=("seed",), dtype="auto", kv_cache_dtype="auto")
    parser.add_argument(
        "--progress",
        choices=MODES,
        default="auto",
        help="auto: a bar on a terminal, log lines elsewhere (default: %(default)s)",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE.html",
        help="write an HTML page with captions and thumbnails; needs --output",
    )


def _add_prompt(group: argparse._ArgumentGroup) -> None:
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help=f"prompt of the captions; if repeated, each image has a caption per prompt (default: {DEFAULT_PROMPT!r})",
    )
    prompt.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.json",
        help='read several prompts from a list of texts, or of {"name": ..., "prompt": ...}',
    )
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="read the prompt from a file")
    prompt.add_argument("--preset", choices=PRESETS, help="use a predefined prompt")
    group.add_argument("--list-presets", action=_ListPresets, nargs=0, help="print the prompts of the presets")
    group.add_argument(
        "--schema",
        type=Path,
        metavar="FILE",
        help="write captions as JSON that matches the JSON schema in this file; records have the parsed object",
    )
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        metavar="N",
        help="maximum length of a caption, -1 for none (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 is greedy (default: %(default)s)",
    )
    group.add_argument(
        "--beam-width",
        type=at_least_one,
        metavar="N",
        help="beam search with this many beams, instead of greedy decoding",
    )
    group.add_argument(
        "--n",
        type=at_least_one,
        default=1,
        metavar="N",
        help="captions per prompt; more than one needs --temperature or --beam-width (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, metavar="N", help="seed that makes sampled captions reproducible")
    group.add_argument(
        "--no-stop-on-repetition",
        dest="stop_on_repetition",
        action="store_false",
        help="do not end captions that repeat themselves; by default, they end with finish_reason repetition",
    )
    group.add_argument("--min-pixels", type=at_least_one, metavar="N", help="enlarge smaller images to this area")
    group.add_argument(
        "--max-pixels", type=at_least_one, metavar="N", help="shrink larger images to this area, which is faster"
    )
    group.add_argument(
        "--jpeg-draft",
        action="store_true",
        help="decode large JPEGs at a reduced scale, which is faster and changes pixel values",
    )
    group.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="treat special tokens in prompts, system message and contexts as control tokens instead of text",
    )
    add_template_argument(group)
    group.add_argument(
        "--context-from",
        metavar="SUFFIX",
        help="add the text of the file with this suffix beside each image, such as .txt with tags, to the prompt",
    )
    group.add_argument(
        "--context-mode",
        choices=CONTEXT_MODES,
        default="prepend",
        help="where the context goes: before or after the prompt (default: %(default)s)",
    )
    group.add_argument("--prefix", default="", metavar="TEXT", help="text before every caption")
    group.add_argument("--suffix", default="", metavar="TEXT", help="text after every caption")
    group.add_argument("--trigger-word", metavar="WORD", help="write 'WORD, ' between prefix and caption")


def _add_videos(group: argparse._ArgumentGroup) -> None:
    sampling = group.add_mutually_exclusive_group()
    sampling.add_argument(
        "--video-fps", type=_positive, metavar="F", help="frames to sample per second, at least 4 in all (default: 2)"
    )
    sampling.add_argument(
        "--video-frames", type=at_least_one, metavar="N", help="frames to sample of each clip, an even number"
    )
    group.add_argument(
        "--video-max-pixels",
        type=at_least_one,
        metavar="N",
        help="shrink larger frames to this area (default: 768 tokens for two frames, less for many frames)",
    )
    group.add_argument(
        "--clip-seconds",
        type=seconds,
        metavar="S",
        help="caption longer videos as clips of this length, with a record each",
    )
    group.add_argument(
        "--animations-as-clips",
        action="store_true",
        help="treat GIF, WebP, AVIF, APNG and TIFF files with several frames as videos, not as images",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output", type=Path, metavar="FILE", help="file for the records; the same command resumes it")
    group.add_argument(
        "--format",
        choices=FORMATS,
        help=f"{' and '.join(FILE_FORMATS)} write a file for each image in addition to the records (default: by the "
        "suffix of --output, else jsonl)",
    )
    group.add_argument("--output-dir", type=Path, metavar="DIR", help="write caption files to DIR, in the same folders")
    group.add_argument(
        "--ordered", action="store_true", help="record images in the order in which they are found, not as they finish"
    )
    group.add_argument(
        "--caption-extension", metavar="SUFFIX", help="suffix of txt's caption files, such as .caption (default: .txt)"
    )
    group.add_argument("--overwrite", action="store_true", help="replace the output and existing caption files")
    group.add_argument(
        "--append-anyway", action="store_true", help="append to an output that was written with other settings"
    )


def _add_selection(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--limit", type=at_least_one, metavar="N", help="caption at most N images that are not recorded yet"
    )
    group.add_argument(
        "--shard",
        type=_shard,
        metavar="I/N",
        help="caption the I-th of N parts of the images, 1/N to N/N; give all N runs the same PATH",
    )
    group.add_argument("--skip-existing", action="store_true", help="skip images whose caption file exists")
    group.add_argument("--retry-failed", action="store_true", help="caption only images that are recorded as failed")
    group.add_argument("--fail-fast", action="store_true", help="stop at the first failure")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="local: engines on this machine; ray: Ray Data with one engine per actor (default: %(default)s)",
    )
    group.add_argument(
        "--data-parallel-size",
        type=_size,
        default=1,
        metavar="N",
        help="engines on this machine, each in a process with --tensor-parallel-size CUDA devices or its part of the "
        "CPU's threads, and each with its own limits, such as --cpu-kvcache-bytes; auto: as many as the CUDA "
        "devices allow (default: %(default)s)",
    )
    group.add_argument(
        "--endpoint",
        metavar="URL",
        help="let a server with OpenAI's API, such as http://localhost:8000/v1, write the captions, and load no model; "
        "its API key is read from the environment variable OPENAI_API_KEY",
    )
    add_options(group, EndpointOptions, exclude=("url",), names=ENDPOINT_NAMES)
    add_options(group, RayOptions, names=RAY_NAMES)


def run(args: argparse.Namespace) -> int:
    prompts, ray, endpoint = _prompts(args), _ray_options(args), _endpoint_options(args)
    args.schema = _schema(args)
    _check(args, prompts)
    if endpoint is None:
        print_bundled_notice(args)
    from mmvllm.captioning.errors import JobError
    from mmvllm.captioning.run import caption_images

    job = caption_images(
        args.paths,
        model=args.model,
        engine_args=given_options(args, EngineConfig, exclude=SETTINGS),
        ray=ray,
        endpoint=endpoint,
        **prompts,
        **{name: getattr(args, name) for name in PASSED_ON},
    )
    try:
        with job, stopping(job) as signals, Display(args.progress, job), own_stdout(args.executor) as out:
            show = Printer(out, prints_all=job.output.journal is None, as_json=args.format == "jsonl")
            for record in job:
                show(record)
    except JobError as error:
        print(f"mmvllm caption: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signals[-1]
    summary = summarize(job)
    if args.progress != "none":
        print(as_lines(summary), file=sys.stderr)
    if args.report is not None:
        from mmvllm.captioning.outputs.report import write_report

        try:
            title, timeouts = f"Captions in {job.output.path.name}", Timeouts(args.image_timeout, args.video_timeout)
            write_report(args.report, job.output.journal.records(), summary, title, timeouts)
        except OSError as error:
            print(f"mmvllm caption: {args.report} cannot be written: {explained(error)}", file=sys.stderr)
            return 1
    if signals:
        return 128 + signals[0]
    return 3 if job.num_failed else 0


def _check(args: argparse.Namespace, prompts: dict[str, Any]) -> None:
    """Raise ValueError for wrong arguments, before torch is imported."""
    if args.endpoint is None:
        check(args)
    find_items(args.paths)  # refuses paths that do not exist
    names = {field.name for field in fields(CaptionSettings)}.intersection(PASSED_ON)
    settings = CaptionSettings(**prompts, **{name: getattr(args, name) for name in names})
    check_output(settings, args.output, **{name: getattr(args, name) for name in OUTPUT_OPTIONS})
    if args.report is not None:
        from mmvllm.captioning.outputs.report import check_place

        check_place(args.report)
        if args.output is None and args.format not in FILE_FORMATS:
            raise ValueError("--report shows the records; give --output too")


def _endpoint_options(args: argparse.Namespace) -> EndpointOptions | None:
    given = given_options(args, EndpointOptions, ENDPOINT_NAMES)
    if args.endpoint is None:
        if given:
            raise ValueError(f"{listed_options(given, ENDPOINT_NAMES)} needs --endpoint")
        return None
    if args.executor == "ray":
        raise ValueError("--executor ray makes engines itself; leave it out with --endpoint")
    size = None if args.data_parallel_size == 1 else args.data_parallel_size
    check_endpoint({"model": args.model, "worker_processes": args.worker_processes or None, "data_parallel_size": size})
    check_endpoint(given_options(args, EngineConfig) | {"min_pixels": args.min_pixels, "jpeg_draft": args.jpeg_draft})
    return EndpointOptions(**given)


def _ray_options(args: argparse.Namespace) -> RayOptions | None:
    given = given_options(args, RayOptions, RAY_NAMES)
    if args.executor == "ray":
        if args.data_parallel_size != 1:
            raise ValueError("--data-parallel-size is for --executor local; with Ray give --actors")
        if find_spec("ray") is None:
            raise ValueError("--executor ray needs Ray Data: pip install 'mmvllm[ray]'")
        return RayOptions(**given)
    if given:
        raise ValueError(f"{listed_options(given, RAY_NAMES)} needs --executor ray")
    return None


def _prompts(args: argparse.Namespace) -> dict[str, Any]:
    """Return the setting `prompt` or `prompts` that the options select."""
    if args.prompt_file is not None:
        return {"prompt": _text_of("--prompt-file", args.prompt_file)}
    if args.preset is not None:
        return {"prompt": PRESETS[args.preset]}
    if args.prompts is not None:
        return {"prompts": _list_of(args.prompts)}
    given = args.prompt or [DEFAULT_PROMPT]
    return {"prompt": given[0]} if len(given) == 1 else {"prompts": given}


def _list_of(path: Path) -> list:
    text = _text_of("--prompts", path)
    try:
        given = parse_json(text)
    except ValueError as error:
        raise ValueError(f"--prompts {path} is not JSON: {error}") from error
    if not isinstance(given, list):
        raise ValueError(f"--prompts {path} must be a JSON list, got {type(given).__name__}")
    return given


def _text_of(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {explained(error)}") from error


def _schema(args: argparse.Namespace) -> str | None:
    """Return the JSON schema of the captions, as text."""
    if args.schema is None:
        own = PRESET_SCHEMAS.get(args.preset)
        return None if own is None else json.dumps(own)
    if args.preset in PRESET_SCHEMAS:
        raise ValueError(f"--preset {args.preset} has its own schema; give --schema with a --prompt")
    try:
        return args.schema.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = explained(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"--schema {args.schema} cannot be read: {reason}") from error


def _positive(text: str) -> float:
    """Parse a positive number, as an argparse type."""
    try:
        if 0 < (value := float(text)) < float("inf"):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _size(text: str) -> int | str:
    """Parse a number of engines or "auto", as an argparse type."""
    if text == "auto":
        return text
    try:
        return at_least_one(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor auto") from None


def _shard(text: str) -> tuple[int, int]:
    """Parse I/N, as an argparse type."""
    i, slash, n = text.partition("/")
    if not (slash and i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N")
    return int(i), int(n)


class _ListPresets(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for name, prompt in PRESETS.items():
            print(f"{name}: {prompt}")
        parser.exit()


@contextmanager
def stopping(job: "CaptionRun") -> Iterator[list[int]]:
    """Stop the job at the first SIGINT or SIGTERM, and end it at the second; yield the list of received signals."""
    received: list[int] = []

    def stop(number: int, _) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        job.stop()
        # Not print, because the signal may interrupt another print.
        os.write(2, b"\nstopping: images in flight are finished first; interrupt again to stop now\n")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ended_by_second_signal():
            yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
