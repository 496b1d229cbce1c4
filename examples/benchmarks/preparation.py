"""The CPU time of preparing an image in one thread, beside Pillow alone and transformers.

    python examples/benchmarks/preparation.py --model Qwen/Qwen2-VL-2B-Instruct

Prints, for each format and size, the milliseconds of

- Pillow: decode, convert to RGB and resize to the model's size, without patches or a digest.
- mmvllm: from the same bytes to uint8 patches and their digest.
- draft: the same with `jpeg_draft`, if a reduced scale of the JPEG has enough pixels.
- transformers: from the same bytes to float32 patches, by its image processor with Pillow.

All run in turns in one thread, twice in each round. The best second run counts, which makes other load, and memory that
another method has unmapped, matter little. Images are smooth noise; `--grain` adds noise to each pixel, like cameras,
which makes files larger and decoding slower.
"""

import argparse
import io
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from mmvllm.bench.reference import decoded, image_processor
from mmvllm.bench.workload import encoded, image_sizes, smooth_noise
from mmvllm.models.folder import resolve_folder
from mmvllm.models.registry import load_image_config
from mmvllm.processors.images.bounds import pixel_bounds
from mmvllm.processors.images.load import load_image
from mmvllm.processors.images.processor import ImageProcessor, draft_for

Way = Callable[[bytes], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the bundled demo model)")
    parser.add_argument("--max-pixels", type=int, help="pixels of a resized image (default: the checkpoint's)")
    parser.add_argument("--sizes", default="448x448,1024x768,4000x3000", help="default: %(default)s")
    parser.add_argument("--formats", default="jpeg,png", help="default: %(default)s")
    parser.add_argument("--grain", type=int, default=0, help="largest noise of a pixel (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each case (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ways = _ways(args)
    names = list(ways)
    print(f"{'':<28}" + "".join(f"{name:>15}" for name in names) + "".join(f"{f'/ {name}':>15}" for name in names[:1]))
    for image_format in args.formats.split(","):
        for width, height in image_sizes(args.sizes):
            data = encoded(_image(width, height, args.grain), image_format)
            times = _milliseconds(ways, data, args.rounds)
            title = f"{image_format} {width}x{height}, {len(data) // 1024} KiB"
            cells = "".join(f"{times[name]:12.2f} ms" for name in names)
            print(f"{title:<28}{cells}{times['mmvllm'] / times['Pillow']:15.2f}")


def _ways(args: argparse.Namespace) -> dict[str, Way]:
    folder = resolve_folder(args.model, with_weights=False)
    config, bounds = load_image_config(folder), (None, args.max_pixels)
    own = ImageProcessor(config)
    low, high = pixel_bounds(*bounds, config.min_pixels, config.max_pixels)
    theirs = image_processor(folder, min_pixels=low, max_pixels=high)

    def pillow(data: bytes) -> Image.Image:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        height, width = config.resized(image.height, image.width, *bounds)
        return image.resize((width, height), Image.Resampling.BICUBIC)

    draft = draft_for(config, {}, *bounds)
    return {
        "Pillow": pillow,
        "mmvllm": lambda data: own(load_image(data), *bounds),
        "draft": lambda data: own(load_image(data, draft), *bounds),
        "transformers": lambda data: theirs([decoded(data)], return_tensors="pt"),
    }


def _image(width: int, height: int, grain: int) -> Image.Image:
    image = smooth_noise(width, height, seed=[0])
    if not grain:
        return image
    noise = np.random.default_rng(0).integers(-grain, grain, (height, width, 1), endpoint=True)
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def _milliseconds(ways: dict[str, Way], data: bytes, rounds: int) -> dict[str, float]:
    """Return the least CPU time of this thread that each method took in any round."""
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            way(data)
            start = time.thread_time()
            way(data)
            least[name] = min(least[name], time.thread_time() - start)
    return {name: 1000 * seconds for name, seconds in least.items()}


if __name__ == "__main__":
    main()
