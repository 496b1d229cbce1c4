"""The `mmvllm` command. Heavy imports wait until a subcommand needs them, so that `--help` answers at once."""

import argparse
import io
import logging
import os
import sys
from importlib import import_module

import mmvllm
from mmvllm.cli.common import option_name
from mmvllm.errors import ArgumentError

COMMANDS = {
    "bench": "measure throughput, latency, preparation or kernels",
    "caption": "describe pictures: files and folders in, a caption per picture out",
    "demo": "a page to talk about pictures with a model, in the browser",
    "info": "versions, devices, usable attention paths, and the KV cache that fits",
    "serve": "answer over HTTP, as OpenAI's API does",
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 0 all well, 1 a crash, 2 wrong usage, 3 some pictures failed,
    130 interrupted, 141 nobody reads the output any more."""
    parser = argparse.ArgumentParser(prog="mmvllm", description=mmvllm.__doc__)
    parser.add_argument("--version", action="version", version=f"mmvllm {mmvllm.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        import_module(f"mmvllm.cli.{name}").add_arguments(subparser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    for stream in (sys.stdout, sys.stderr):
        # A name or caption that the terminal cannot show must not end the run; a pipe gets captions as they are made.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        return import_module(f"mmvllm.cli.{args.command}").run(args)
    except BrokenPipeError:  # who reads us, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:  # the user's to mend: a wrong argument, checkpoint or file
        message = error.spelled(option_name) if isinstance(error, ArgumentError) else str(error)
        print(f"mmvllm {args.command}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
