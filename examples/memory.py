"""Resident memory over thousands of different images, which must reach a plateau.

    python examples/memory.py --images 2000

Streams images, drawn on demand, through one `LLM` with the bundled model, and prints the resident size. The KV cache
and the steps are small: memory reaches its maximum early, and later growth is a leak.
Exits with 1 if the peak of the second half of the run is more than 5 % above the peak of the second quarter.
"""

import argparse
import random
import sys

from scenes import draw, random_scene

from mmvllm import LLM, SamplingParams

try:
    import psutil
except ImportError:
    raise SystemExit("this example needs the psutil package: pip install psutil") from None


def requests(count: int):
    for i in range(count):
        rng = random.Random(i)
        content = [
            {"type": "image", "image": draw(random_scene(rng), rng)},
            {"type": "text", "text": "Describe this image."},
        ]
        yield {"messages": [{"role": "user", "content": content}]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    args = parser.parse_args()
    if args.images < 4:
        parser.error("--images must be at least 4")
    llm = LLM(
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_vision_patches=1024,
        num_kvcache_blocks=256,
        encoder_cache_bytes=1024 * 1024,
    )
    process = psutil.Process()
    sizes = []
    for i, _ in enumerate(llm.stream_multimodal(requests(args.images), SamplingParams(max_tokens=8)), start=1):
        sizes.append(process.memory_info().rss / 2**20)
        if i % max(1, args.images // 10) == 0:
            print(f"{i:6} images  {sizes[-1]:7.1f} MiB", flush=True)
    half = len(sizes) // 2
    first, second = max(sizes[half // 2 : half]), max(sizes[half:])
    print(f"largest in the second quarter {first:.1f} MiB, in the second half {second:.1f} ({second / first - 1:+.1%})")
    return 0 if second <= 1.05 * first else 1


if __name__ == "__main__":
    sys.exit(main())
