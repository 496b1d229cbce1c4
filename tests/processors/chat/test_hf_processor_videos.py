"""A processor of the caller's is given the frames of videos, and its patches are used."""

import numpy as np
import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.errors import RequestError
from mmvllm.processors.videos.clip import Clip, VideoInfo
from mmvllm.processors.videos.processor import VideoProcessor
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.media.images import normalized
from tests.helpers.media.videos import moving
from tests.helpers.models.shapes import every_family

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
FRAMES = [*moving(5, 60, 90)]
QUESTION = ask("See ", {"video": FRAMES, "fps": 2}, noise_image(60, 60), {"video": FRAMES[:3]}, " and say.")


class TakesVideos:
    """Calls like transformers' processors, which normalize patches and may leave placeholders as they are."""

    def __init__(self, llm, change=lambda made: None):
        self.llm, self.change, self.given = llm, change, []

    def apply_chat_template(self, messages, **keys):
        return self.llm.tokenizer.apply_chat_template(messages, **keys)

    def __call__(self, text, images=None, videos=None, video_metadata=None, do_sample_frames=None, return_tensors=None):
        self.given.append((videos, video_metadata, do_sample_frames))
        made = {"input_ids": torch.tensor([self.llm.tokenizer(text[0], add_special_tokens=False)["input_ids"]])}
        engine = self.llm.engine
        if images:
            prompt = self.llm.processor(ask(*images))
            made["pixel_values"] = torch.cat([item.patches for item in prompt.mm_items])
            made["image_grid_thw"] = torch.tensor([item.grid for item in prompt.mm_items])
        if videos:
            config, media = engine.video_config, []
            for frames, facts in zip(videos, video_metadata, strict=True):
                info = VideoInfo(facts["total_num_frames"], facts["fps"], *frames.shape[1:3])
                media.append(VideoProcessor(config)(Clip(frames, info, tuple(facts["frames_indices"]))))
            patches = torch.cat([one.patches for one in media])
            made["pixel_values_videos"] = normalized(patches, config)
            made["video_grid_thw"] = torch.tensor([one.grid for one in media])
        return self.change(made) or made


@pytest.mark.slow
@every_family
def test_completions_equal_those_of_the_own_processor(checkpoint, make_llm):
    llm = make_llm(checkpoint, enable_prefix_caching=False)
    prompt, theirs = llm.processor(QUESTION), llm._preparer.adapt(foreign := TakesVideos(llm))(QUESTION)
    assert theirs.token_ids == prompt.token_ids and np.array_equal(theirs.positions, prompt.positions)
    assert [(item.modality, item.grid, item.placeholder) for item in theirs.mm_items] == [
        (item.modality, item.grid, item.placeholder) for item in prompt.mm_items
    ]
    ((videos, metadata, do_sample_frames),) = foreign.given
    assert [len(frames) for frames in videos] == [6, 3] and do_sample_frames is False
    assert [(facts["fps"], facts["duration"]) for facts in metadata] == [(2, 3.0), (2.0, 1.5)]
    want, got = (
        llm.generate_multimodal([QUESTION], SHORT, processor=processor)[0].token_ids for processor in (None, foreign)
    )
    assert got == want


def test_another_number_of_videos_is_refused(checkpoint, make_llm):
    llm = make_llm(checkpoint)

    def one_video(made: dict) -> None:
        made["video_grid_thw"] = made["video_grid_thw"][:1]

    with pytest.raises(RequestError, match="the processor returned 1 video_grid_thw for 2 videos"):
        llm._preparer.adapt(TakesVideos(llm, one_video))(QUESTION)


def test_videos_in_a_prompt_of_token_ids_are_refused(checkpoint, make_llm):
    llm = make_llm(checkpoint)
    with pytest.raises(RequestError, match="a prompt with media as text, not as token ids"):
        llm._preparer.adapt(TakesVideos(llm))({"prompt_token_ids": [1, 2], "videos": [FRAMES]})
