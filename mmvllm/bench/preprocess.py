"""`mmvllm bench preprocess`: image preprocessing, by size, format and number of threads, or that of a video."""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median

import torch

from mmvllm.bench import preprocess_video
from mmvllm.bench.report import number, print_table, record
from mmvllm.bench.workload import encoded, image_sizes, smooth_noise
from mmvllm.intake import NUM_WORKERS
from mmvllm.models.folder import resolve_folder
from mmvllm.models.registry import load_image_config
from mmvllm.processors.image import ImageProcessor
from mmvllm.processors.load import load_image

FORMATS = ("jpeg", "png", "webp")


def run(args: argparse.Namespace) -> dict:
    """Print the table; return the record."""
    if args.video is not None:
        return preprocess_video.run(args)
    sizes, formats, most = image_sizes(args.sizes), _formats(args.formats), args.workers or NUM_WORKERS
    if args.images < most:
        raise ValueError(f"--images is {args.images}, fewer than the {most} threads; raise it")
    processors = _processors(resolve_folder(args.model, with_weights=False), args.compare)
    results = []
    for (width, height), image_format in product(sizes, formats):
        data = encoded(smooth_noise(width, height, seed=[0]), image_format)
        for workers in _worker_counts(most):
            speeds = _images_per_second(processors, [data] * args.images, workers, args.repeat)
            case = {"size": f"{width}x{height}", "format": image_format, "workers": workers}
            results.append(case | {"images_per_second": speeds})
    _print(results, args)
    return record(args, torch.device("cpu"), None, results=results)


def _formats(text: str) -> list[str]:
    formats = text.lower().split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"--formats has {unknown[0]!r}; known: {', '.join(FORMATS)}")
    return formats


def _processors(folder: Path, compare: str | None) -> dict[str, Callable[[bytes], object]]:
    processor = ImageProcessor(load_image_config(folder))
    processors = {"mmvllm": lambda data: processor(load_image(data))}
    if compare:
        from mmvllm.bench.reference import decoded, image_processor

        theirs = image_processor(folder)
        processors["transformers"] = lambda data: theirs([decoded(data)], return_tensors="pt")
    return processors


def _worker_counts(most: int) -> list[int]:
    """1, 2, 4 and so on, and finally `most`."""
    return [1 << i for i in range((most - 1).bit_length())] + [most]


def _images_per_second(processors: dict, images: list[bytes], workers: int, repeat: int) -> dict[str, float]:
    """By processor, measured in turns; the first turn of each is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in processors}
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(repeat + 1):
            for name, processor in processors.items():
                start = time.perf_counter()
                for _ in pool.map(processor, images):
                    pass
                seconds[name].append(time.perf_counter() - start)
    return {name: len(images) / median(times[1:]) for name, times in seconds.items()}


def _print(results: list[dict], args: argparse.Namespace) -> None:
    names = list(results[0]["images_per_second"])
    header = [f"{name} {unit}" for name in names for unit in ("images/s", "thread ms each")] + ["ratio"] * (
        len(names) - 1
    )
    rows = []
    for case in results:
        speeds = case["images_per_second"]
        cells = [value for speed in speeds.values() for value in (speed, 1000 * case["workers"] / speed)]
        cells += [speeds["mmvllm"] / speeds[name] for name in names[1:]]
        threads = f"{case['workers']} thread{'s' if case['workers'] > 1 else ''}"
        rows.append([f"{case['size']} {case['format']}, {threads}", *map(number, cells)])
    print_table(f"{args.images} images, median of {args.repeat}", header, rows)
