"""Ids, grids, pixels and positions of videos equal values that transformers made with torchvision, hashed in a file."""

import hashlib
import importlib.util
import json
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from mmvllm.models.registry import family_of, load_config, load_media_configs
from mmvllm.processors.chat.processor import Processor
from mmvllm.processors.images.processor import ImageProcessor
from mmvllm.processors.videos.clip import Clip, VideoInfo
from mmvllm.processors.videos.load import Load
from mmvllm.processors.videos.processor import ClipPlan, VideoProcessor, resize_frame
from tests.helpers.engine.requests import grids_of, patches_of
from tests.helpers.media.images import normalized
from tests.helpers.models.metadata import ROOT, VIDEO_ROOT, needs_video_reference
from tests.helpers.models.tokenizers import tokenizer_of

pytestmark = needs_video_reference


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """What made the values; it also makes the frames."""
    spec = importlib.util.spec_from_file_location("video_reference", VIDEO_ROOT / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cases() -> list[dict]:
    return json.loads((VIDEO_ROOT / "reference.json").read_text())["cases"]


class Given:
    """A case's frames as a reader gives them, and the processor of its checkpoint."""

    def __init__(self, script: ModuleType, case: dict):
        self.case, folder = case, ROOT / script.MODELS[case["family"]]
        self.frames = script.frames(case["seed"], case["frames"], case["height"], case["width"])
        config = load_config(folder)
        images, self.config = load_media_configs(folder)
        rules = family_of(config.architecture).media_rules(config)
        if rules.tokens_per_second:  # the model that made the positions has transformers' default
            rules = replace(rules, tokens_per_second=4)
        processor = VideoProcessor(self.config)
        self.processor = Processor(tokenizer_of(folder.name), ImageProcessor(images), rules, processor)

    def read(self, source: str, plan: ClipPlan) -> Clip:
        info = VideoInfo(*(self.case[name] for name in ("frames", "source_fps", "height", "width")))
        indices = plan.frame_indices(info) if self.case["do_sample_frames"] else list(range(len(self.frames)))
        sizes = plan.sizes(len(indices), info.height, info.width)
        return Clip(np.stack([resize_frame(self.frames[i], sizes) for i in indices]), info, tuple(indices))

    def prompt(self):
        parts = [{"type": "video", "video": "x"}, {"type": "text", "text": "Describe this video."}]
        kwargs = {name: self.case[name] for name in ("fps", "num_frames") if name in self.case}
        request = {"messages": [{"role": "user", "content": parts}], "mm_processor_kwargs": kwargs}
        return self.processor(request, Load(video=self.read))


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_every_case_equals_transformers(script, cases):
    compared = [case for case in cases if "error" not in case]
    assert len(compared) == 25
    for case in compared:
        given = Given(script, case)
        prompt = given.prompt()
        [[t, h, w]] = case["video_grid_thw"]
        pixels = normalized(torch.cat(patches_of(prompt)), given.config)
        assert prompt.token_ids == [token for token, length in case["input_ids_rle"] for _ in range(length)], case
        assert grids_of(prompt) == [(1, h, w)] * t, case
        assert digest(pixels) == case["pixel_sha256"], case
        assert digest(torch.from_numpy(prompt.positions)[:, None]) == case["positions_sha256"], case
        assert prompt.position_delta == case["mrope_position_delta"], case


@pytest.mark.slow
def test_what_the_reference_refuses_gives_what_a_user_expects(script, cases):
    """One frame fills a temporal patch; a request's number of frames replaces the checkpoint's rate."""
    one, eight = (case for case in cases if "error" in case)
    assert (one["family"], one["frames"], eight["family"], eight["num_frames"]) == ("qwen3_vl", 1, "qwen3_vl", 8)
    given = Given(script, one)
    prompt = given.prompt()
    assert [t for t, _, _ in grids_of(prompt)] == [1]
    assert "<0.0 seconds>" in given.processor.tokenizer.decode(prompt.token_ids)
    assert [t for t, _, _ in grids_of(Given(script, eight).prompt())] == [1] * 4
