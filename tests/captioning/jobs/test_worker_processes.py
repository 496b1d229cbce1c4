"""Images are prepared in worker processes by a processor of the caller's."""

import os
import signal
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmvllm import LLM
from mmvllm.captioning import caption_images
from mmvllm.errors import ArgumentError
from tests.helpers.engine.requests import noise_image

ENGINE = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 256, "skip_warmup": True}


class CallersProcessor:
    """The interface of transformers' processors, without a video processor."""

    def __init__(self, folder: str):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def apply_chat_template(self, messages: list[dict], **options) -> str:
        return self.tokenizer.apply_chat_template(messages, **options)

    def __call__(self, text: list[str], images: list | None, return_tensors: str) -> dict:
        return {**self.tokenizer(text), **self.images(images, return_tensors=return_tensors)}


@pytest.fixture
def processor(checkpoint) -> CallersProcessor:
    return CallersProcessor(checkpoint)


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(3):
        noise_image(60 + i, 64, seed=i).save(folder / f"{i}.png")
    return folder


def captions(folder: Path, llm: LLM, **options) -> dict[str, str]:
    return {record["path"]: record["caption"] for record in caption_images(folder, llm=llm, max_tokens=4, **options)}


@pytest.mark.spawns
def test_captions_with_a_callers_processor_are_those_of_threads(folder, checkpoint, processor):
    with LLM(checkpoint, processor=processor, **ENGINE) as llm:
        want = captions(folder, llm)
        assert len(want) == 3 and None not in want.values()
        assert captions(folder, llm, worker_processes=True, workers=2) == want


class CrashingProcessor(CallersProcessor):
    """Ends its process for images of one width, or for the first image, which it marks."""

    def __init__(self, folder: str, width: int | None = None, marker: Path | None = None):
        super().__init__(folder)
        self.width, self.marker = width, marker

    def __call__(self, text: list[str], images: list | None, return_tensors: str) -> dict:
        if images[0].width == self.width:
            os._exit(9)
        if self.marker is not None and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(text, images, return_tensors)


@pytest.mark.slow
def test_an_image_that_ends_its_process_fails_alone(folder, checkpoint):
    with LLM(checkpoint, processor=CrashingProcessor(checkpoint, width=61), **ENGINE) as llm:
        made = caption_images(folder, llm=llm, max_tokens=4, worker_processes=True, workers=1)
        errors = {Path(record["path"]).name: record["error"] for record in made}
    reason = "preparation failed, its worker process died twice: it ended with exit code 9"
    assert errors == {"0.png": None, "1.png": reason, "2.png": None}


@pytest.mark.slow
def test_an_image_whose_process_is_killed_once_is_captioned(folder, checkpoint, processor, tmp_path):
    with LLM(checkpoint, processor=processor, **ENGINE) as llm:
        want = captions(folder, llm)
    with LLM(checkpoint, processor=CrashingProcessor(checkpoint, marker=tmp_path / "killed"), **ENGINE) as llm:
        assert captions(folder, llm, worker_processes=True, workers=1) == want
    assert (tmp_path / "killed").exists()


class StuckProcessor(CallersProcessor):
    """Never returns from an image of one width."""

    def __call__(self, text: list[str], images: list | None, return_tensors: str) -> dict:
        while images[0].width == 61:
            time.sleep(1)
        return super().__call__(text, images, return_tensors)


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_killed(folder, checkpoint):
    options = {"worker_processes": True, "workers": 1, "image_timeout": 5}
    with LLM(checkpoint, processor=StuckProcessor(checkpoint), **ENGINE) as llm:
        made = caption_images(folder, llm=llm, max_tokens=4, **options)
        errors = {Path(record["path"]).name: record["error"] for record in made}
    reason = "took longer than 5 s to load; shrink or re-encode it, or raise image_timeout"
    assert errors == {"0.png": None, "1.png": reason, "2.png": None}


class Unloadable(CallersProcessor):
    """Can be pickled, but ends the process in which it is unpickled."""

    def __reduce__(self):
        return os._exit, (4,)


@pytest.mark.spawns
def test_processes_that_end_as_soon_as_they_begin_end_the_run(folder, checkpoint):
    with (
        LLM(checkpoint, processor=Unloadable(checkpoint), **ENGINE) as llm,
        pytest.raises(RuntimeError, match="worker processes end as soon as they begin: it ended with exit code 4"),
    ):
        captions(folder, llm, worker_processes=True)


def test_a_processor_that_cannot_be_pickled_is_refused_before_the_run(folder, checkpoint, processor, tmp_path):
    out = tmp_path / "out.jsonl"
    with LLM(checkpoint, processor=processor, **ENGINE) as llm:
        captions(folder, llm, output=out)
        before = out.read_bytes()
        processor.change = lambda made: made
        with pytest.raises(ArgumentError, match=r"worker_processes needs a processor that can be pickled: .*lambda"):
            caption_images(folder, llm=llm, output=out, overwrite=True, worker_processes=True)
    assert before and out.read_bytes() == before
