"""`mmvllm bench preprocess`: preprocessing of images, by size, format and number of workers, or of a video."""

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import torch

from mmvllm.bench import preprocess_video
from mmvllm.bench.report import number, print_table, record
from mmvllm.bench.workload import encoded, image_sizes, smooth_noise
from mmvllm.entrypoints.request_queue import NUM_WORKERS
from mmvllm.inputs import Grid
from mmvllm.models.folder import resolve_folder
from mmvllm.models.registry import load_image_config
from mmvllm.processes.pool import WorkerPool
from mmvllm.processors.images.load import load_image
from mmvllm.processors.images.processor import ImageProcessor, ImageProcessorConfig

FORMATS = ("jpeg", "png", "webp")

Processors = dict[str, Callable[[bytes], object]]


def run(args: argparse.Namespace) -> dict:
    """Print the table and return the record."""
    if args.video is not None:
        return preprocess_video.run(args)
    sizes, formats, most = image_sizes(args.sizes), _formats(args.formats), args.workers or NUM_WORKERS
    if args.images < max(most, args.processes):
        kind = "threads" if args.images < most else "processes"
        raise ValueError(f"--images is {args.images}, fewer than the {max(most, args.processes)} {kind}; raise it")
    folder = resolve_folder(args.model, with_weights=False)
    processors = _processors(folder, args.compare)
    ways = [("thread", workers) for workers in _worker_counts(most)]
    ways += [("process", workers) for workers in _worker_counts(args.processes)]
    results = []
    for (width, height), image_format in product(sizes, formats):
        data = encoded(smooth_noise(width, height, seed=[0]), image_format)
        for kind, workers in ways:
            with nullcontext(processors) if kind == "thread" else _in_processes(folder, workers) as measured:
                speeds, busy = _images_per_second(measured, [data] * args.images, workers, args.repeat)
            case = {"size": f"{width}x{height}", "format": image_format, "workers": workers, "kind": kind}
            results.append(case | {"images_per_second": speeds, "cpu_seconds_per_image": busy})
    _print(results, args)
    return record(args, torch.device("cpu"), None, results=results)


def _formats(text: str) -> list[str]:
    formats = text.lower().split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"--formats has {unknown[0]!r}; known: {', '.join(FORMATS)}")
    return formats


def _processors(folder: Path, compare: str | None) -> Processors:
    processor = ImageProcessor(load_image_config(folder))
    processors = {"mmvllm": lambda data: processor(load_image(data))}
    if compare:
        from mmvllm.bench.reference import decoded, image_processor

        theirs = image_processor(folder)
        processors["transformers"] = lambda data: theirs([decoded(data)], return_tensors="pt")
    return processors


@contextmanager
def _in_processes(folder: Path, num_workers: int) -> Iterator[Processors]:
    """Yield mmvllm's processor in worker processes; calling it includes the parent's work for each image."""
    pool = WorkerPool(num_workers, _start_worker, (load_image_config(folder),))
    try:
        yield {"mmvllm": lambda data: pool.run(_prepare_in_worker, data)}
    finally:
        pool.close()


_processor: ImageProcessor | None = None  # of a worker process


def _start_worker(config: ImageProcessorConfig) -> None:
    global _processor
    _processor = ImageProcessor(config)


def _prepare_in_worker(data: bytes) -> tuple[np.ndarray, Grid, tuple[bytes, ...]]:
    media = _processor(load_image(data))
    return media.patches.numpy(), media.grid, media.digests


def _worker_counts(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and finally `most`; an empty list for 0."""
    return [1 << i for i in range((most - 1).bit_length())] + [most] if most else []


def _images_per_second(
    processors: Processors, images: list[bytes], workers: int, repeat: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return images per second, and this process's CPU seconds per image, by processor.

    Processors take turns, and the first turn of each is a warm-up.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in processors}
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(repeat + 1):
            for name, processor in processors.items():
                start, busy = time.perf_counter(), time.process_time()
                for _ in pool.map(processor, images):
                    pass
                times[name].append((time.perf_counter() - start, time.process_time() - busy))
    medians = {name: [median(column) for column in zip(*spent[1:], strict=True)] for name, spent in times.items()}
    speeds = {name: len(images) / seconds for name, (seconds, _) in medians.items()}
    return speeds, {name: busy / len(images) for name, (_, busy) in medians.items()}


def _print(results: list[dict], args: argparse.Namespace) -> None:
    names = list(results[0]["images_per_second"])
    units = ("images/s", "ms each", "CPU ms here")
    header = [f"{name} {unit}" for name in names for unit in units] + ["ratio"] * (len(names) - 1)
    rows = []
    for case in results:
        speeds, workers = case["images_per_second"], case["workers"]
        cells = [cell for name in names for cell in _cells(case, name)]
        cells += [speeds["mmvllm"] / speeds[name] if name in speeds else None for name in names[1:]]
        plural = "" if workers == 1 else {"thread": "s", "process": "es"}[case["kind"]]
        rows.append([f"{case['size']} {case['format']}, {workers} {case['kind']}{plural}", *map(number, cells)])
    print_table(f"{args.images} images, median of {args.repeat}", header, rows)


def _cells(case: dict, name: str) -> list[float | None]:
    if name not in case["images_per_second"]:
        return [None] * 3
    speed = case["images_per_second"][name]
    return [speed, 1000 * case["workers"] / speed, 1000 * case["cpu_seconds_per_image"][name]]
