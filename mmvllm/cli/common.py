"""Arguments and argument types shared by several subcommands."""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmvllm.errors import RequestError
from mmvllm.processors.chat.template_kwargs import check_template_kwargs
from mmvllm.utils.arguments import MAX_SECONDS
from mmvllm.utils.text import parse_json


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the bundled demo model)")


def option_name(name: str) -> str:
    """Return the option that sets a Python argument: "output_dir" -> "--output-dir"."""
    return f"--{name.replace('_', '-')}"


def at_least_one(text: str) -> int:
    """Parse a number of at least one, as an argparse type."""
    return _integer(text, 1)


def context_length(text: str) -> int | None:
    """Parse a number of tokens, also as vLLM's users write it (4k, 4K for 4096); None for auto and -1."""
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d*[1-9]\d*)([kK]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 4096, 4k (4,000) or 4K (4,096)")
    return int(match[1]) * {"": 1, "k": 1000, "K": 1024}[match[2]]


def output_file(text: str) -> Path:
    """Parse the name of a file to write, as an argparse type."""
    if text == "-":
        raise argparse.ArgumentTypeError("must be a file, got -, which means standard output elsewhere")
    return Path(text)


def seconds(text: str) -> float:
    """Parse a number of seconds, as an argparse type."""
    try:
        if 0 < float(text) < MAX_SECONDS:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def add_max_waiting_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-waiting",
        type=whole_number,
        default=256,
        metavar="N",
        help="requests that may wait beyond --max-num-seqs of each engine; further ones are refused as busy "
        "(default: %(default)s)",
    )


def add_release_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--release-after",
        type=seconds,
        metavar="S",
        help="free the memory of weights and caches after S seconds without a request; the next one waits until "
        "the model is loaded again (default: never)",
    )


def add_data_parallel_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("engines").add_argument(
        "--data-parallel-size",
        type=at_least_one,
        default=1,
        metavar="N",
        help="number of engines that share the requests, each in a separate process, with the engine options and, on "
        "CUDA, with its own --tensor-parallel-size devices (default: %(default)s)",
    )


def add_completion_arguments(group: argparse._ArgumentGroup, otherwise: str) -> None:
    """Add options of commands that sample with the checkpoint's defaults; `otherwise` describes `none`."""
    group.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        type=lambda name: "none" if name == "vllm" else name,  # as vLLM calls it
        default="auto",
        help="default sampling parameters: auto takes them from the checkpoint's generation_config.json, where it has "
        f"any; none is {otherwise} (default: %(default)s)",
    )
    add_template_argument(group)


def add_template_argument(group: argparse._ArgumentGroup) -> None:
    """Add the option for arguments of the chat template, under our name and the name of vLLM's server."""
    group.add_argument(
        "--default-chat-template-kwargs",
        "--chat-template-kwargs",
        dest="chat_template_kwargs",
        type=_template_kwargs,
        metavar="JSON",
        help="arguments of the chat template, such as '{\"enable_thinking\": false}' (default: none)",
    )


def _template_kwargs(text: str) -> dict[str, Any]:
    """Parse arguments of the chat template, as an argparse type."""
    try:
        return check_template_kwargs(parse_json(text))
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.100} is not JSON: {error}") from None


def print_sampling_defaults(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Print to standard error which sampling defaults of the checkpoint are used, if it has any."""
    if args.generation_config == "auto" and defaults:
        values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        text = f"default sampling parameters from the checkpoint's generation_config.json: {values}"
        print(f"mmvllm {args.command}: {text}; --generation-config none ignores them", file=sys.stderr)


def whole_number(text: str) -> int:
    """Parse a number of at least zero, as an argparse type."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)
