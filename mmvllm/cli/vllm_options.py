"""Options of vLLM's server in pasted commands: accepted if they change nothing, otherwise refused with a hint."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mmvllm.cli.common import at_least_one
from mmvllm.cli.parser import CommandParser
from mmvllm.config import CHECKPOINT_QUANTIZATION

# Options that request what this server does anyway, with the number of their values, or the one value that is accepted.
_UNUSED: dict[str, int | Sequence[str]] = {
    "--trust-remote-code": 0,  # no code of a checkpoint is run
    "--enable-auto-tool-choice": 0,
    "--tool-call-parser": 1,
    "--chat-template-content-format": 1,  # is derived from the template
    "--enable-chunked-prefill": 0,
    "--disable-log-requests": 0,
    "--no-enable-log-requests": 0,
    "--disable-log-stats": 0,
    "--disable-uvicorn-access-log": 0,
    "--disable-fastapi-docs": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-server-load-tracking": 0,
    "--swap-space": 1,  # preempted sequences are recomputed
    "--pipeline-parallel-size": ("1",),
    "-pp": ("1",),
    "--enable-sleep-mode": 0,
    "--exclude-tools-when-tool-choice-none": 0,
    "--tokenizer-mode": ("auto",),
    "--max-logprobs": 1,  # is always 20; a request for more is refused
    "--disable-custom-all-reduce": 0,
    "--cpu-offload-gb": ("0",),
    "--guided-decoding-backend": 1,  # as a field of requests
    "--mm-processor-cache-gb": 1,  # outputs of processors are not cached
    "--disable-mm-preprocessor-cache": 0,
}
_SHORT = {"-tp": "tensor_parallel_size", "-dp": "data_parallel_size"}
_OF_CHECKPOINTS = "a quantized checkpoint says so itself; leave it out"
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
    "--speculative-config": "there is no speculative decoding; leave it out",
    "--compilation-config": "CUDA graphs are captured unless --enforce-eager is given; leave it out",
    "--hf-overrides": "change the config.json of the checkpoint's folder",
    "--convert": "completions and embeddings are served together; leave it out",
    "--distributed-executor-backend": "--executor ray runs replicas on a cluster; leave it out otherwise",
    "--ssl-keyfile": "a reverse proxy in front serves HTTPS",
    "--ssl-certfile": "a reverse proxy in front serves HTTPS",
    "--root-path": "a reverse proxy in front takes the prefix away",
    "--task": "completions and embeddings are served together; leave it out",
    "--runner": "completions and embeddings are served together; leave it out",
    **{f"--quantization {name}": _OF_CHECKPOINTS for name in CHECKPOINT_QUANTIZATION},
}


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Accept the options that change nothing, and explain the others; the tables of options omit them."""
    for option, values in _UNUSED.items():
        keys = {"nargs": values} if isinstance(values, int) else {"choices": values}
        parser.add_argument(option, action=_Unused, dest="unused", help=argparse.SUPPRESS, **keys)
    for option, name in _SHORT.items():
        parser.add_argument(option, type=at_least_one, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    if isinstance(parser, CommandParser):
        parser.hints |= _INSTEAD


def print_unused_options(args: argparse.Namespace) -> None:
    """Print the user's options that have no effect to standard error."""
    if args.unused:
        print(f"mmvllm {args.command}: options without effect: {', '.join(args.unused)}", file=sys.stderr)


class _Unused(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        namespace.unused = [*(namespace.unused or ()), option]
