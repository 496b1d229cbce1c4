"""Arguments that several subcommands share."""

import argparse


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that choose a model and where it runs."""
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the small bundled model)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: %(default)s)")
