"""`mmvllm caption`: writes a caption for each image and each clip of a video."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmvllm.captioning.errors import explained
from mmvllm.captioning.jobs.endpoint_options import EndpointOptions, check_endpoint
from mmvllm.captioning.jobs.ray_options import RayOptions
from mmvllm.captioning.jobs.run_options import RunOptions
from mmvllm.captioning.outputs.caption_files import FILE_FORMATS
from mmvllm.captioning.outputs.options import OutputOptions
from mmvllm.captioning.outputs.output import check_output
from mmvllm.captioning.presets import DEFAULT_PROMPT, PRESET_SCHEMAS, PRESETS
from mmvllm.captioning.settings import ENGINE_SETTINGS, CaptionSettings
from mmvllm.captioning.sources.find import find_items
from mmvllm.cli.caption_output import Printer, as_lines, own_stdout, summarize
from mmvllm.cli.checks import check, print_bundled_notice, read_file
from mmvllm.cli.common import add_model_argument, add_template_argument, at_least_one, option_name, output_file
from mmvllm.cli.options import add_options, given_options, listed_options
from mmvllm.cli.progress import MODES, Display
from mmvllm.config import EngineConfig
from mmvllm.processes.signals import ended_by_second_signal
from mmvllm.utils.text import parse_json

if TYPE_CHECKING:
    from mmvllm.captioning.run import CaptionRun

# Fields of CaptionSettings that are options, in two groups.
PROMPT_FIELDS = (
    *("system", "max_tokens", "temperature", "beam_width", "n", "seed", "stop_on_repetition"),
    *("min_pixels", "max_pixels", "jpeg_draft", "allow_special_tokens"),
    *("context_from", "context_mode", "prefix", "suffix", "trigger_word"),
)
VIDEO_FIELDS = ("video_fps", "video_frames", "video_max_pixels", "clip_seconds", "animations_as_clips")
# Fields of OutputOptions and of RunOptions that select images.
SELECTION_FIELDS, RUN_SELECTION_FIELDS = ("skip_existing", "retry_failed"), ("limit", "shard", "fail_fast")
PREPARATION_FIELDS = ("accept_truncated", "workers", "worker_processes", "image_timeout", "video_timeout")
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
    add_options(parser.add_argument_group("videos"), CaptionSettings, VIDEO_FIELDS)
    output = parser.add_argument_group("output (without --output, captions are printed)")
    add_options(output, OutputOptions, exclude=SELECTION_FIELDS)
    add_options(output, RunOptions, ("ordered",))
    selection = parser.add_argument_group("selection of images")
    add_options(selection, RunOptions, RUN_SELECTION_FIELDS, parsers={"shard": _shard})
    add_options(selection, OutputOptions, SELECTION_FIELDS)
    add_options(parser, RunOptions, PREPARATION_FIELDS)
    _add_engine(parser.add_argument_group("where to run"))
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=("seed",))
    parser.add_argument(
        "--progress",
        choices=MODES,
        default="auto",
        help="auto: a bar on a terminal, log lines elsewhere (default: %(default)s)",
    )
    parser.add_argument(
        "--report",
        type=output_file,
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
    add_template_argument(group)
    add_options(group, CaptionSettings, PROMPT_FIELDS)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="local: engines on this machine; ray: Ray Data with one engine per actor (default: %(default)s)",
    )
    add_options(group, RunOptions, ("data_parallel_size",), parsers={"data_parallel_size": _size})
    group.add_argument(
        "--endpoint",
        metavar="URL",
        help="let a server with OpenAI's API, such as http://localhost:8000/v1, write the captions, and load no model; "
        "its API key is read from the environment variable OPENAI_API_KEY",
    )
    add_options(group, EndpointOptions, exclude=("url",), names=ENDPOINT_NAMES)
    add_options(group, RayOptions, names=RAY_NAMES)


def run(args: argparse.Namespace) -> int:
    _check_standard_input(args)
    args.schema = _schema(args)
    settings = _prompts(args) | given_options(args, CaptionSettings, exclude=("model", "prompt", "prompts"))
    outputs, options = given_options(args, OutputOptions), given_options(args, RunOptions)
    ray, endpoint = _ray_options(args), _endpoint_options(args, settings | options)
    _check(args, CaptionSettings(**settings), OutputOptions(**outputs))
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
        **settings,
        **outputs,
        **options,
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
            title, timeouts = f"Captions in {job.output.path.name}", RunOptions(**options).timeouts
            write_report(args.report, job.output.journal.records(), summary, title, timeouts)
        except OSError as error:
            print(f"mmvllm caption: {args.report} cannot be written: {explained(error)}", file=sys.stderr)
            return 1
    if signals:
        return 128 + signals[0]
    return 3 if job.num_failed else 0


def _check(args: argparse.Namespace, settings: CaptionSettings, outputs: OutputOptions) -> None:
    """Raise ValueError for wrong arguments, before torch is imported."""
    if args.endpoint is None:
        check(args)
    find_items(args.paths)  # refuses paths that do not exist
    check_output(settings, outputs)
    if args.report is not None:
        from mmvllm.captioning.outputs.report import check_place

        check_place(args.report)
        if args.output is None and args.format not in FILE_FORMATS:
            raise ValueError("--report shows the records; give --output too")


def _check_standard_input(args: argparse.Namespace) -> None:
    files = {"PATH": "-" in args.paths} | {
        option_name(name): getattr(args, name) == Path("-") for name in ("prompt_file", "prompts", "schema")
    }
    if len(readers := [name for name, is_stdin in files.items() if is_stdin]) > 1:
        raise ValueError(f"{' and '.join(readers)} are -, but only one of them can read standard input; name files")


def _endpoint_options(args: argparse.Namespace, options: dict[str, Any]) -> EndpointOptions | None:
    given = given_options(args, EndpointOptions, names=ENDPOINT_NAMES)
    if args.endpoint is None:
        if given:
            raise ValueError(f"{listed_options(given, ENDPOINT_NAMES)} needs --endpoint")
        return None
    if args.executor == "ray":
        raise ValueError("--executor ray makes engines itself; leave it out with --endpoint")
    check_endpoint({"model": args.model} | given_options(args, EngineConfig) | options)
    return EndpointOptions(**given)


def _ray_options(args: argparse.Namespace) -> RayOptions | None:
    given = given_options(args, RayOptions, names=RAY_NAMES)
    if args.executor == "ray":
        if args.data_parallel_size not in (None, 1):
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
        return {"prompt": read_file("--prompt-file", args.prompt_file).strip()}
    if args.preset is not None:
        return {"prompt": PRESETS[args.preset]}
    if args.prompts is not None:
        return {"prompts": _list_of(args.prompts)}
    given = args.prompt or [DEFAULT_PROMPT]
    return {"prompt": given[0]} if len(given) == 1 else {"prompts": given}


def _list_of(path: Path) -> list:
    text = read_file("--prompts", path)
    try:
        given = parse_json(text)
    except ValueError as error:
        raise ValueError(f"--prompts {path} is not JSON: {error}") from error
    if not isinstance(given, list):
        raise ValueError(f"--prompts {path} must be a JSON list, got {type(given).__name__}")
    return given


def _schema(args: argparse.Namespace) -> str | None:
    """Return the JSON schema of the captions, as text."""
    if args.schema is None:
        own = PRESET_SCHEMAS.get(args.preset)
        return None if own is None else json.dumps(own)
    if args.preset in PRESET_SCHEMAS:
        raise ValueError(f"--preset {args.preset} has its own schema; give --schema with a --prompt")
    return read_file("--schema", args.schema)


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
