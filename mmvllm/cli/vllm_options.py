"""Options of vLLM's server in commands that people paste: those that change nothing, and what to write for others."""

import argparse
import sys
from typing import Any

from mmvllm.cli.parser import CommandParser

# By the number of their values: they ask for what this server does anyway.
_UNUSED = {
    "--trust-remote-code": 0,  # no code of a checkpoint is run
    "--enable-auto-tool-choice": 0,
    "--tool-call-parser": 1,
    "--chat-template-content-format": 1,  # is found out from the template
    "--enable-chunked-prefill": 0,
    "--disable-log-requests": 0,
    "--no-enable-log-requests": 0,
    "--disable-log-stats": 0,
    "--disable-uvicorn-access-log": 0,
    "--disable-fastapi-docs": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-server-load-tracking": 0,
    "--swap-space": 1,  # preempted sequences are computed again
}
_INSTEAD = {
    "--limit-mm-per-prompt": "--max-images and --max-videos limit what a request has",
    "--mm-processor-kwargs": "--max-pixels limits images, and requests have mm_processor_kwargs",
    "--reasoning-parser": "the thoughts of a model are part of its answer; leave it out",
    "--enable-log-requests": "write --log-requests",
    "--uvicorn-log-level": "--access-log logs each request; leave it out",
    "--block-size": "write --kvcache-block-size",
    "--tokenizer": "a checkpoint's own tokenizer is used; leave it out",
    "--revision": "give --model the folder of a snapshot",
    "--download-dir": "set the environment variable HF_HUB_CACHE",
    "--pipeline-parallel-size": "--tensor-parallel-size shares a model among devices",
    "--distributed-executor-backend": "--executor ray runs replicas on a cluster; leave it out otherwise",
    "--ssl-keyfile": "a reverse proxy in front serves HTTPS",
    "--ssl-certfile": "a reverse proxy in front serves HTTPS",
    "--root-path": "a reverse proxy in front takes the prefix away",
    "--task": "completions and embeddings are served together; leave it out",
    "--runner": "completions and embeddings are served together; leave it out",
}


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Accept the options that change nothing, and explain the others; the tables of options do not show them."""
    for option, num_values in _UNUSED.items():
        parser.add_argument(option, action=_Unused, nargs=num_values, dest="unused", help=argparse.SUPPRESS)
    if isinstance(parser, CommandParser):
        parser.hints |= _INSTEAD


def tell_unused(args: argparse.Namespace) -> None:
    """Print the options that were given and have no effect to standard error."""
    if args.unused:
        print(f"mmvllm {args.command}: options without effect: {', '.join(args.unused)}", file=sys.stderr)


class _Unused(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        namespace.unused = [*(namespace.unused or ()), option]
