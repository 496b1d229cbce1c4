"""`video_backend`: the package qwen-vl-utils reads videos where it is installed; here a stand-in module."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from mmvllm import LLM, AsyncLLM
from mmvllm.errors import VideoError
from tests.helpers.engine.requests import ask, digests_of
from tests.helpers.media.videos import make_clip, moving

ENGINE = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 256, "skip_warmup": True}


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """A package whose `fetch_video` gives four frames; what it was asked for."""
    package, calls = ModuleType("qwen_vl_utils"), []

    def fetch_video(ele, image_patch_size, return_video_sample_fps, return_video_metadata):
        assert return_video_sample_fps and return_video_metadata
        calls.append({**ele, "patch": image_patch_size})
        if ele["video"].endswith(".broken"):
            raise KeyError("no stream")
        frames = torch.from_numpy(moving(4, 56, 84)).permute(0, 3, 1, 2).float()
        facts = {"fps": 8.0, "frames_indices": torch.tensor([0, 3, 6, 9]), "total_num_frames": 10}
        return (frames, facts), 3.2

    package.fetch_video = fetch_video
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", package)
    return calls


def test_paths_and_urls_are_read_by_the_package(calls, checkpoint, tmp_path):
    with LLM(checkpoint, video_backend="qwen-vl-utils", **ENGINE) as llm:
        prompt = llm.processor(ask({"video": "https://example.org/a.mp4", "fps": 1.5, "max_pixels": 90_000}))
        llm.processor({**ask({"video": tmp_path / "a.mp4"}), "mm_processor_kwargs": {"num_frames": 4}})
        frames = moving(4, 56, 84)
        same = llm.processor(ask({"video": [*frames], "sample_fps": 3.2, "resized_height": 56, "resized_width": 84}))
    video = {"type": "video", "patch": 14}
    assert calls == [
        {**video, "video": "https://example.org/a.mp4", "fps": 1.5, "max_pixels": 90_000},
        {**video, "video": str(tmp_path / "a.mp4"), "nframes": 4},
    ]
    assert [item.grid for item in prompt.mm_items] == [(1, 4, 6)] * 2
    assert all(torch.equal(a.patches, b.patches) for a, b in zip(prompt.mm_items, same.mm_items, strict=True))
    assert digests_of(prompt) == digests_of(same), "the rate of the frames is the same, too"


def test_other_sources_are_read_by_mmvllm(calls, checkpoint, tmp_path):
    data = make_clip(tmp_path / "a.mp4").read_bytes()
    with LLM(checkpoint, video_backend="qwen-vl-utils", **ENGINE) as llm, LLM(checkpoint, **ENGINE) as own:
        for source in (data, [np.zeros((56, 56, 3), dtype=np.uint8)] * 2):
            request = ask({"video": source})
            assert digests_of(llm.processor(request)) == digests_of(own.processor(request))
    assert calls == []


def test_what_the_package_raises_is_an_error_of_the_video(calls, checkpoint):
    with LLM(checkpoint, video_backend="qwen-vl-utils", **ENGINE) as llm, pytest.raises(VideoError) as caught:
        llm.processor(ask("One", {"video": "a.broken"}))
    assert str(caught.value) == "video 0: a.broken: qwen-vl-utils cannot read it (KeyError: 'no stream')"


@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
def test_a_backend_that_is_missing_or_unknown_is_refused_at_once(engine, checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", None)  # importing it fails
    with pytest.raises(ValueError, match=r"video_backend='qwen-vl-utils' cannot be used \(.*pip install qwen-vl-utils"):
        engine(checkpoint, video_backend="qwen-vl-utils", **ENGINE)
    with pytest.raises(ValueError, match="video_backend must be 'pyav' or 'qwen-vl-utils', got 'opencv'"):
        engine(checkpoint, video_backend="opencv", **ENGINE)
