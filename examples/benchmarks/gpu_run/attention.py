"""Attention kernels side by side, and the Triton kernels with other tiles, at the shapes of a checkpoint.

    python -m gpu_run.attention FOLDER

Prints a table and, as its last line, the times in microseconds as JSON. Kernels that cannot run have the reason.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from mmvllm.bench.kernels import kernel_shapes
from mmvllm.kernels import packed_attention, paged_attention
from mmvllm.kernels.common.dispatch import Case
from mmvllm.models.registry import load_config

TILES = [(128, 64, 8), (128, 64, 4), (128, 128, 8), (128, 32, 4), (64, 64, 4), (64, 128, 4)]  # rows, keys, warps
DECODE_KEYS = [16, 32, 64, 128]  # keys of a tile
MAX_SPLITS = [8, 16, 32, 64]
STAGES = [2, 3, 4, 5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="measure one case of each kernel, with one choice")
    args = parser.parse_args()
    on_cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_cuda else "cpu"), torch.bfloat16 if on_cuda else torch.float16
    shapes = kernel_shapes(load_config(args.folder))
    results = []
    for module in (packed_attention, paged_attention):
        for case in [*module.cases(shapes, device, dtype)][: 1 if args.small else None]:
            for name, seconds in _measured(case, device, changes=_changes(case)[-1 if args.small else 0 :]):
                results.append({"case": f"{case.kernel} {case.label}", "choice": name, **seconds})
                print(*results[-1].values(), sep="  ", flush=True)
    print(json.dumps({"results": results}))


def _measured(case: Case, device: torch.device, changes: list[tuple[str, str, object]]) -> Iterator[tuple[str, dict]]:
    for name, work in _backends(case):
        yield name, _timed(work, device)
    for name, label, value in changes:
        with _replaced(name, value):
            yield f"{name} {label}", _timed(_kernel(case, "triton"), device)


def _kernel(case: Case, kind: str) -> Callable[[], object]:
    module = {"packed_attention": packed_attention, "paged_attention": paged_attention}[case.kernel]
    return partial(getattr(module, f"{case.kernel}_{kind}"), *case.args)


def _backends(case: Case) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the kernel as it is, its reference, and for a ViT's attention the libraries' kernels."""
    yield "triton", _kernel(case, "triton")
    yield "torch", _kernel(case, "torch")
    if case.kernel == "packed_attention":
        yield "torch varlen_attn", partial(_varlen, case)
        yield "flash-attn", partial(_flash, case)


def _varlen(case: Case) -> None:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v, cu_seqlens, longest = case.args
    varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest)


def _flash(case: Case) -> None:
    from flash_attn import flash_attn_varlen_func

    q, k, v, cu_seqlens, longest = case.args
    flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest)


def _changes(case: Case) -> list[tuple[str, str, object]]:
    """Return other values of a function or constant of the attention files: its name, the value's label, the value."""
    changes = [("tile_sizes", str(tile), lambda *_, tile=tile: tile) for tile in TILES]
    if case.kernel == "paged_attention" and case.args[-1] == 1:
        changes = [("decode_block_n", str(keys), lambda *_, keys=keys: keys) for keys in DECODE_KEYS]
        changes += [("MAX_SPLITS", str(most), most) for most in MAX_SPLITS]
    if case.kernel == "paged_attention":
        changes += [("PAGED_STAGES", str(stages), stages) for stages in STAGES]
    return changes


@contextmanager
def _replaced(name: str, value: object) -> Iterator[None]:
    """Replace a function or constant of the attention files inside the `with` statement."""
    before = {module: getattr(module, name) for module in (packed_attention, paged_attention) if hasattr(module, name)}
    for module in before:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, own in before.items():
            setattr(module, name, own)


def _timed(work: Callable[[], object], device: torch.device) -> dict:
    try:
        return {"microseconds": round(_microseconds(work, device), 2)}
    except Exception as error:  # more shared memory than the card has, or a package that is missing
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"}


def _microseconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        from triton.testing import do_bench

        return 1000 * do_bench(work, return_mode="median")
    start = perf_counter()
    work()
    return 1e6 * (perf_counter() - start)


if __name__ == "__main__":
    main()
