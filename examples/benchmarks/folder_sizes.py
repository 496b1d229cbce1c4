"""Time and memory per image in folders of 10 to 10,000 images; the time should be the same in all of them.

    python examples/benchmarks/folder_sizes.py

Draws different JPEG images in folders of 10, 100, 1,000 and 10,000 (250 MB for 11,110 of 448x448), and captions one
folder after the other with one engine, by default of the bundled model, recording to a JSONL file. CPU time includes
all threads of the process; on a machine with other load, it varies less than wall-clock time. The resident size is
measured after each folder, its peak during the folder, if the system reports it.
"""

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from mmvllm.cli.common import at_least_one

IMAGES = Path(__file__).resolve().parent.parent / "images"


def draw(folder: Path, count: int, side: int) -> None:
    """Write images of side x side pixels, different from images in folders of other sizes."""
    from mmvllm.bench.workload import encoded, smooth_noise

    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"{i:06}.jpg").write_bytes(encoded(smooth_noise(side, side, seed=[count, i]), "jpeg"))


def measure(folder: Path, llm, max_tokens: int) -> dict[str, float]:
    """Caption a folder, and return seconds and resident bytes."""
    import psutil
    import torch

    from mmvllm.bench.runs import peak_memory, reset_peak_memory
    from mmvllm.captioning import caption_images

    host = torch.device("cpu")
    reset_peak_memory(host)
    output = None if folder == IMAGES else folder.with_suffix(".jsonl")
    start, cpu_start = time.perf_counter(), time.process_time()
    records = list(caption_images(folder, llm=llm, prompt="Describe this image.", max_tokens=max_tokens, output=output))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    assert all(record["error"] is None for record in records), "an image failed"
    return {
        "images": len(records),
        "seconds_per_image": seconds / len(records),
        "cpu_seconds_per_image": cpu_seconds / len(records),
        "resident_bytes": psutil.Process().memory_info().rss,
        "peak_bytes": peak_memory(host),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(benchmark="folder_sizes")
    parser.add_argument("--counts", type=at_least_one, nargs="+", default=[10, 100, 1000, 10_000], metavar="N")
    parser.add_argument("--side", type=at_least_one, default=448, help="side of each image in pixels")
    parser.add_argument("--max-tokens", type=at_least_one, default=16)
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the small bundled model)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the last line to this file")
    args = parser.parse_args(argv)

    from mmvllm import LLM
    from mmvllm.bench.report import emit, number, print_table, record

    with TemporaryDirectory(prefix="folder-sizes-") as path:
        for count in args.counts:
            draw(Path(path) / str(count), count, args.side)
            print(f"{count} images drawn", file=sys.stderr)
        llm = LLM(args.model)
        measure(IMAGES, llm, args.max_tokens)  # to warm up
        results = [measure(Path(path) / str(count), llm, args.max_tokens) for count in args.counts]
        device = llm.engine.model_runner.device
        llm.exit()
    milliseconds, mebibytes = ("seconds_per_image", "cpu_seconds_per_image"), ("resident_bytes", "peak_bytes")
    rows = [
        [
            str(result["images"]),
            *(number(result[name], 1000) for name in milliseconds),
            *(number(result[name], 2**-20) for name in mebibytes),
        ]
        for result in results
    ]
    print_table("images", ["ms per image", "CPU ms per image", "resident MiB", "peak MiB"], rows)
    emit(record(args, device, None, results=results), args.json)


if __name__ == "__main__":
    main()
