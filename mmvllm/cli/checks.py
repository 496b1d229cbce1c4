"""Checks that every command makes before torch is imported, which takes seconds."""

import argparse
import sys
from pathlib import Path

from mmvllm.captioning.errors import explained
from mmvllm.cli.options import given_options
from mmvllm.config import EngineConfig
from mmvllm.utils.text import decode_text, read_text

BUNDLED_NOTICE = (
    "without --model this is the bundled demonstration model, with 3.1 million parameters. It was trained on synthetic "
    "scenes of colored shapes and digits, such as those in examples/images, and describes nothing else. For other "
    "images give a checkpoint, for example --model Qwen/Qwen2-VL-2B-Instruct."
)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for a wrong engine option, or for a model that is not supported."""
    given = vars(args)
    exclude = ("seed",)  # it may be the seed of captions, which may be negative
    EngineConfig(**given_options(args, EngineConfig, exclude=exclude))
    if given.get("executor", "local") == "local":  # a folder may be on Ray's machines only
        from mmvllm.models.folder import check_model

        check_model(args.model, with_weights="load_format" in given and args.load_format != "dummy")


def print_bundled_notice(args: argparse.Namespace) -> None:
    """Print to standard error what the bundled model is for, if no other model is selected."""
    if args.model is None:
        print(f"mmvllm {args.command}: {BUNDLED_NOTICE}", file=sys.stderr)


def read_file(option: str, path: Path) -> str:
    """Return the text of an option's file, or of standard input for "-"; raises ValueError, which names both."""
    try:
        return decode_text(sys.stdin.buffer.read()) if path == Path("-") else read_text(path)
    except (OSError, ValueError) as error:
        reason = explained(error) if isinstance(error, OSError) else error
        raise ValueError(f"{option} {path} cannot be read: {reason}") from None
