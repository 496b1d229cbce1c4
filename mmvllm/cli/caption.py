"""`mmvllm caption`: files and folders in, a caption per picture out."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from mmvllm.cli.common import add_model_arguments
from mmvllm.outputs import RequestOutput

SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="picture, or folder of pictures")
    add_model_arguments(parser)
    parser.add_argument("--prompt", default="Describe this image.", help="what to ask (default: %(default)r)")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="write one JSON record per picture here")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest caption (default: %(default)s)")
    parser.add_argument("--progress", choices=("auto", "none"), default="auto", help="bar on a terminal, or none")


def run(args: argparse.Namespace) -> int:
    from mmvllm.llm import LLM
    from mmvllm.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=args.max_tokens)
    paths = list(find_pictures(args.paths))
    if args.output and not args.output.parent.is_dir():
        raise ValueError(f"--output {args.output}: there is no folder {args.output.parent}; make it first")
    requests = [_request(i, path, args.prompt) for i, path in enumerate(paths)]
    with ExitStack() as stack:
        llm = LLM(args.model, device=args.device, dtype=args.dtype)
        stack.callback(llm.exit)
        # Opened only now: a wrong --model must not empty the file of an earlier run.
        output = stack.enter_context(_open(args.output)) if args.output else None
        results = llm.stream_multimodal(requests, params, use_tqdm=args.progress == "auto", on_error="return")
        failed = [_report(path, result, output) for path, result in zip(paths, _in_order(results), strict=True)]
    return 3 if any(failed) else 0


def _open(path: Path) -> TextIO:
    # File names need not be Unicode; what UTF-8 cannot hold, backslashreplace writes as JSON's own escapes.
    return path.open("w", encoding="utf-8", errors="backslashreplace")


def _report(path: Path, result: RequestOutput, output: TextIO | None) -> bool:
    """Write one picture's caption or error to the file, or else to the terminal; True for an error."""
    # Without the words that say which picture it is about: the path already does.
    error = result.error and result.error.removeprefix("image 0: ").removeprefix(f"{path!s:.200}: ")
    if output:
        record = {"path": str(path), "caption": None if error else result.text, "error": error}
        print(json.dumps(record, ensure_ascii=False), file=output, flush=True)
    else:
        from tqdm import tqdm  # its print keeps lines and bar apart

        tqdm.write(f"{path}: {error or result.text}", file=sys.stderr if error else sys.stdout)
    return error is not None


def _in_order(results: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
    """Hold back what finished early; request ids are indices."""
    early: dict[int, RequestOutput] = {}
    index = 0
    for result in results:
        early[int(result.request_id)] = result
        while index in early:
            yield early.pop(index)
            index += 1


def find_pictures(paths: list[Path]) -> Iterator[Path]:
    """Files as they are given, and what looks like a picture in folders, sorted."""
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
            if not found:
                raise ValueError(f"{path} has no pictures ({', '.join(sorted(SUFFIXES))})")
            yield from found
        else:
            yield path  # a missing or broken file becomes a record with its error


def _request(index: int, path: Path, prompt: str) -> dict:
    content = [{"type": "image", "image": path}, {"type": "text", "text": prompt}]
    return {"request_id": str(index), "messages": [{"role": "user", "content": content}]}
