"""A failed request keeps its error's text and facts, and no decoded image, also without a garbage collection."""

import asyncio
import gc
import io
import os
import struct
import zlib
from collections.abc import Iterator

import psutil
import pytest
from PIL import Image

from mmvllm import AsyncLLM
from mmvllm.captioning import caption_images
from mmvllm.entrypoints.request_queue import Prefetcher
from mmvllm.errors import ImageError, RequestError
from mmvllm.processors.images.load import load_image
from tests.helpers.engine.async_engines import OPTIONS, wait_until
from tests.helpers.engine.requests import ask

MiB = 1024 * 1024


def truncated_png(side: int) -> bytes:
    """A PNG of a few hundred bytes that declares side x side RGBA pixels; its data ends early."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    zip = zlib.compressobj()
    row = zip.compress(bytes(4 * side + 1)) + zip.flush(zlib.Z_SYNC_FLUSH)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", row)


def live_images() -> int:
    return sum(issubclass(type(one), Image.Image) for one in gc.get_objects())


@pytest.fixture
def num_images() -> Iterator[int]:
    """The number of PIL images before the test, which runs without garbage collections."""
    Image.init()  # the Palm plugin creates an image when it is loaded
    gc.collect()
    gc.disable()
    yield live_images()
    gc.enable()


@pytest.fixture(scope="module")
def bad() -> bytes:
    return truncated_png(500)


def test_the_image_is_damaged_where_it_is_decoded(bad):
    assert Image.open(io.BytesIO(bad)).size == (500, 500)
    with pytest.raises(ImageError, match="damaged or truncated"):
        load_image(bad)


@pytest.mark.slow
def test_a_prefetcher_holds_no_image_of_a_failed_item(num_images, bad):
    prefetcher = Prefetcher([{"image": bad}] * 5, lambda request: load_image(request["image"]), max_requests=9)
    items = [prefetcher.get(wait=True) for _ in range(5)]
    assert all(isinstance(item.prompt.exception(), ImageError) for item in items)
    prefetcher.close()
    assert live_images() == num_images


@pytest.mark.slow
def test_outputs_of_failed_requests_hold_no_image(llm, num_images, bad):
    outputs = llm.generate_multimodal([ask("Look", bad)] * 4, {"max_tokens": 1}, use_tqdm=False, on_error="return")
    assert all("truncated" in output.error and output.exception.image_index == 0 for output in outputs)
    assert all(output.exception.__traceback__ is None for output in outputs)
    assert live_images() == num_images


@pytest.mark.slow
def test_failed_captions_hold_no_image(llm, num_images, bad, tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(bad)
    records = [*caption_images(tmp_path, llm=llm, max_tokens=1)]
    assert len(records) == 4 and all("truncated" in record["error"] for record in records)
    assert live_images() == num_images


async def failures(engine: AsyncLLM, request: dict, number: int) -> list[RequestError]:
    async def failure() -> RequestError:
        with pytest.raises(RequestError, match="truncated") as caught:
            async for _ in engine.generate(request):
                pass
        return caught.value

    return await asyncio.gather(*(failure() for _ in range(number)))


@pytest.fixture(scope="module")
def async_engine(checkpoint) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(checkpoint, **OPTIONS)
    yield engine
    asyncio.run(engine.shutdown())


@pytest.mark.slow
def test_errors_of_failed_streams_hold_no_image(async_engine, num_images, bad):
    kept = asyncio.run(failures(async_engine, ask("Look", bad), 8))
    assert len(kept) == 8 and live_images() == num_images


@pytest.mark.slow
def test_large_failed_images_leave_memory_where_it_was(async_engine, num_images):
    request, process = ask("Look", truncated_png(8000)), psutil.Process(os.getpid())
    asyncio.run(failures(async_engine, request, 2))
    before = process.memory_info().rss
    asyncio.run(failures(async_engine, request, 64))
    assert live_images() == num_images
    # One decoded image has 244 MiB. The system may count freed memory for a moment.
    wait_until(lambda: process.memory_info().rss < before + 128 * MiB, "as small as before")
