"""The cost of decoding images in a worker process, as the server does, beside a thread of the same process.

    python examples/benchmarks/decoding.py

Prints the fastest of several runs for JPEG photographs of a few sizes, one at a time.
"""

import argparse
import time
from collections.abc import Callable

from mmvllm.bench.workload import encoded, smooth_noise
from mmvllm.media import MediaPolicy
from mmvllm.media.decoding import MediaDecoder

SIZES = ((500, 400), (1920, 1080), (4000, 3000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=20, help="runs of each case (default: %(default)s)")
    repeat = parser.parse_args().repeat
    policy = MediaPolicy()
    decoder = MediaDecoder(policy)
    with decoder.session() as session:
        print(f"{'start of a process and first image':<36}{_milliseconds(session.image, _jpeg(64, 64), 1):8.1f} ms")
        print(f"{'size':<12}{'file':>10}{'thread':>12}{'process':>12}")
        for width, height in SIZES:
            data = _jpeg(width, height)
            times = [_milliseconds(decode, data, repeat) for decode in (policy.load, session.image)]
            cells = "".join(f"{one:9.1f} ms" for one in times)
            print(f"{f'{width}x{height}':<12}{len(data) // 1024:>6} KiB{cells}")
    decoder.close()


def _jpeg(width: int, height: int) -> bytes:
    return encoded(smooth_noise(width, height, seed=[0]), "jpeg")


def _milliseconds(decode: Callable[[bytes], object], data: bytes, repeat: int) -> float:
    """Return the milliseconds of the fastest of some runs."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        decode(data)
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


if __name__ == "__main__":
    main()
