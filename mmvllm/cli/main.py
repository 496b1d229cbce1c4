"""The `mmvllm` command; only subcommands import heavy modules, because `--help` must be fast."""

import io
import logging
import os
import sys
from importlib import import_module

import mmvllm
from mmvllm.cli.common import option_name
from mmvllm.cli.parser import CommandParser
from mmvllm.errors import ArgumentError, ParameterError

COMMANDS = {
    "bench": "measure throughput, latency, preprocessing or kernels",
    "caption": "caption images in files and folders",
    "demo": "serve a chat page for images",
    "info": "show versions, devices, attention backends and the size of the KV cache",
    "serve": "serve an OpenAI-compatible HTTP API",
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand and return the exit code.

    0 is success, 1 a crash, 2 wrong usage, 3 that some images failed, 130 an interrupt, 141 a closed output pipe.
    """
    parser = CommandParser(prog="mmvllm", description=mmvllm.__doc__)
    parser.add_argument("--version", action="version", version=f"mmvllm {mmvllm.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        import_module(f"mmvllm.cli.{name}").add_arguments(subparser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal cannot show must not end the run; pipes receive captions line by line.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        return import_module(f"mmvllm.cli.{args.command}").run(args)
    except BrokenPipeError:  # the reader, for example `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:  # errors that the user can fix: a wrong argument, checkpoint or file
        print(f"mmvllm {args.command}: {_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _sentence(error: ValueError | OSError) -> str:
    if isinstance(error, ArgumentError):
        return error.format(option_name)
    if isinstance(error, ParameterError):
        return str(error).replace(error.param, option_name(error.param), 1)
    if isinstance(error, OSError) and error.strerror:
        from mmvllm.captioning.errors import explained

        name = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return f"{name}{explained(error)}"
    return str(error)
