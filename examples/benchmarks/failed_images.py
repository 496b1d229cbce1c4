"""Memory after failed images: captioning of 1,000 broken files, and 1,000 requests with broken images to the server.

    pip install ".[serve,test]" && python examples/benchmarks/failed_images.py

Half of the images are PNGs of a few hundred bytes that declare 8000x8000 pixels, and half are BLP textures that do
(only captioning reads these; the server refuses them). Each fails after its decoder has allocated the whole image, 256
MB. Captioning runs in this process, the server in another process, with the bundled model. Ordinary images come first,
to load libraries and caches. Prints the resident size before, the peak, and after; exits with 1 if it is more than 5 %
larger afterwards.
"""

import argparse
import asyncio
import base64
import json
import re
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import openai
import psutil

from mmvllm import LLM
from mmvllm.captioning import caption_images

SIDE = 8000
CONCURRENCY = 64
MAX_GROWTH = 0.05
SAMPLE_S = 0.05
IMAGES = Path(__file__).resolve().parent.parent / "images"


def truncated_png(number: int) -> bytes:
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 6, 0, 0, 0)), (b"tEXt", b"number\0%d" % number)]
    chunks.append((b"IDAT", zlib.compress(bytes(100_000))))
    framed = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return (b"\x89PNG\r\n\x1a\n" + b"".join(framed))[:-8]


def truncated_blp(number: int) -> bytes:
    header = struct.pack("<4sIBBBBII", b"BLP2", 1, 1, 0, 0, 0, SIDE, SIDE)
    return header + bytes(64) + struct.pack("<16I", *[SIDE * SIDE] * 16) + bytes(1024) + b"%d" % number


def broken_image(number: int) -> bytes:
    return truncated_blp(number) if number % 2 else truncated_png(number)


@dataclass
class Memory:
    """Resident bytes of a process and its children: before, the peak, after."""

    before: int = 0
    peak: int = 0
    after: int = 0

    @property
    def growth(self) -> float:
        return self.after / self.before - 1


@contextmanager
def measured(process: psutil.Process) -> Iterator[Memory]:
    memory, stop = Memory(before=resident(process)), threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE_S):
            memory.peak = max(memory.peak, resident(process))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield memory
    finally:
        stop.set()
        watcher.join()
    time.sleep(1)
    memory.after = resident(process)


def resident(process: psutil.Process) -> int:
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return total


def caption(num_images: int) -> Memory:
    with TemporaryDirectory() as folder:
        (broken := Path(folder) / "broken").mkdir()
        for number in range(num_images):
            (broken / f"{number:04}.png").write_bytes(broken_image(number))
        with LLM(num_kvcache_blocks=256) as llm:
            assert num_failed(caption_images([IMAGES] * 20, llm=llm, max_tokens=8)) == 0
            with measured(psutil.Process()) as memory:
                assert num_failed(caption_images(broken, llm=llm)) == num_images
    return memory


def num_failed(records: Iterable[dict]) -> int:
    return sum(record["error"] is not None for record in records)


def serve(num_requests: int) -> Memory:
    command = [sys.executable, "-m", "mmvllm", "serve", "--port", "0", "--num-kvcache-blocks", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = re.search(r"http://\S+?:\d+", server.stdout.readline())[0]
            return asyncio.run(_attack(url, psutil.Process(server.pid), num_requests))
        finally:
            server.terminate()


async def _attack(url: str, process: psutil.Process, num_requests: int) -> Memory:
    model = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        ordinary = [path.read_bytes() for path in sorted(IMAGES.glob("*.png"))]
        failed = await _ask_all(client, model, ordinary * 20)
        assert failed == 0, failed
        with measured(process) as memory:
            failed = await _ask_all(client, model, [broken_image(number) for number in range(num_requests)])
            assert failed == num_requests, failed
    return memory


async def _ask_all(client: openai.AsyncOpenAI, model: str, images: list[bytes]) -> int:
    """Return the number of requests that fail because of their image; raise any other failure."""
    free = asyncio.Semaphore(CONCURRENCY)

    async def ask(image: bytes) -> bool:
        url = "data:image/png;base64," + base64.b64encode(image).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Describe this image."}]
        async with free:
            try:
                await client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": content}], max_tokens=4
                )
            except openai.BadRequestError:
                return True
        return False

    return sum(await asyncio.gather(*map(ask, images)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="broken images of each kind (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    results = {"caption": caption(args.count), "serve": serve(args.count)}
    if args.json:
        print(json.dumps({name: vars(memory) for name, memory in results.items()}, indent=1))
    else:
        print(f"resident MB, {args.count:,} broken images of {SIDE}x{SIDE}\n            before   peak  after  growth")
        for name, memory in results.items():
            sizes = " ".join(f"{size / 1e6:6.0f}" for size in (memory.before, memory.peak, memory.after))
            print(f"{name:10} {sizes}  {memory.growth:+6.1%}")
    return int(any(memory.growth > MAX_GROWTH for memory in results.values()))


if __name__ == "__main__":
    sys.exit(main())
