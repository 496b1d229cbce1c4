"""What is refused before torch is imported, which takes seconds."""

import argparse

from mmvllm.cli.engine_options import engine_arguments
from mmvllm.config import EngineConfig


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for a wrong engine option, a path that does not exist, and a model that cannot be served."""
    given = vars(args)
    EngineConfig(**engine_arguments(args, exclude=("seed",)))  # the seed may be that of captions, which has any sign
    if "paths" in given:
        from mmvllm.captioning.find import find_items

        find_items(args.paths)
    if given.get("executor", "local") == "local" and "model" in given:  # a folder may be on Ray's machines only
        from mmvllm.models.folder import check_model

        has_engine = "load_format" in given
        check_model(args.model, with_weights=has_engine and args.load_format != "dummy")
