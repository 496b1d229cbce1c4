"""The files of the corpus through captioning and through the server, compared with what plain Pillow makes of them."""

import asyncio
import base64
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from PIL import Image, PngImagePlugin

from mmvllm.captioning.run import caption_images
from mmvllm.captioning.sources import names
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.entrypoints.llm import LLM
from mmvllm.media.policy import FORMATS
from mmvllm.processors.images.load import load_image
from tests.corpus.generate import CorpusFile, corpus, write
from tests.helpers.serving.server import CHAT, ENGINE, chat, image_part, make_app

MAX_PIXELS = 32 * 28 * 28  # of the resized image: the model's time does not matter here


@pytest.fixture(scope="module")
def files() -> list[CorpusFile]:
    return corpus()


@pytest.fixture(scope="module")
def formats(files) -> dict[str, str | None]:
    """Name of a file -> the format that plain Pillow decodes it as; None if it does not."""
    return {file.name: None if file.is_hostile else _format(completed(file)) for file in files}


def completed(file: CorpusFile) -> bytes:
    """The file as plain Pillow needs it: with the end marker of a JPEG."""
    return file.data + b"\xff\xd9" if file.name == "no-end.jpg" else file.data


@contextmanager
def plain_pillow() -> Iterator[None]:
    """Pillow without warnings, and with texts of any size."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        for name in ("MAX_TEXT_CHUNK", "MAX_TEXT_MEMORY"):
            patch.setattr(PngImagePlugin, name, 2**31 - 1)
        yield


def _format(data: bytes) -> str | None:
    with plain_pillow():
        try:
            image = Image.open(io.BytesIO(data))
            if image.format == "EPS":  # which Pillow hands to Ghostscript, where that is installed
                return None
            image.convert("RGBA")
        except Exception:  # Pillow raises any exception for a damaged file
            return None
        return image.format


@pytest.mark.slow
def test_the_corpus_has_both_kinds_of_files(files, formats):
    assert len({file.name for file in files}) == len(files) > 500
    assert sum(value is not None for value in formats.values()) > 250
    assert sum(value is None for value in formats.values()) > 250


@pytest.mark.slow
def test_the_corpus_is_the_same_every_time(files):
    pairs = zip(corpus(), files, strict=True)
    different = [file.name for again, file in pairs if again != file]
    assert set(different) <= {"animation.avif", "animation-truncated.avif"}  # libavif writes the time into them


@pytest.mark.slow
def test_captioning_gives_pillows_verdict(files, formats, tmp_path):
    write(tmp_path)
    with LLM(**ENGINE) as llm:
        made = list(caption_images(sorted(tmp_path.iterdir()), llm=llm, max_tokens=1, max_pixels=MAX_PIXELS))
    accepted = {name: value if value in names.FORMATS else None for name, value in formats.items()}
    assert _different({Path(record["path"]).name: record["error"] is None for record in made}, accepted) == []


@pytest.mark.spawns
def test_the_server_gives_pillows_verdict(files, formats):
    statuses = asyncio.run(_statuses(files))
    accepted = {name: value if value in FORMATS else None for name, value in formats.items()}
    assert set(statuses.values()) == {200, 400}
    assert _different({name: status == 200 for name, status in statuses.items()}, accepted) == []


async def _statuses(files: list[CorpusFile]) -> dict[str, int]:
    async with AsyncLLM(**ENGINE) as engine:
        transport = httpx.ASGITransport(make_app(engine), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            slots = asyncio.Semaphore(4)

            async def status(file: CorpusFile) -> int:
                uri = f"data:image/png;base64,{base64.b64encode(file.data).decode()}"
                body = chat(image_part(uri), "?", max_tokens=1, max_pixels=MAX_PIXELS)
                async with slots:
                    return (await client.post(CHAT, json=body)).status_code

            return dict(zip((file.name for file in files), await asyncio.gather(*map(status, files)), strict=True))


def _different(is_accepted: dict[str, bool], formats: dict[str, str | None]) -> list[str]:
    """The files whose verdict is not that of Pillow."""
    return sorted(name for name in formats if is_accepted[name] != (formats[name] is not None))


@pytest.mark.slow
def test_accepted_files_are_rgb_of_the_upright_size(files, formats):
    for file in files:
        if formats[file.name] is not None:
            with plain_pillow():
                source = Image.open(io.BytesIO(completed(file)))
                source.load()  # which turns a TIFF
                turned = file.name.startswith("orientation-") and source.getexif().get(0x112) in (5, 6, 7, 8)
            image = load_image(file.data)
            assert (image.mode, image.size) == ("RGB", source.size[::-1] if turned else source.size), file.name
