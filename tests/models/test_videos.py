"""Videos that a checkpoint or a prompt cannot take are refused; token ids that are expanded are taken as they are."""

import pytest

from mmvllm import SamplingParams
from mmvllm.errors import RequestError
from tests.helpers.engine.requests import ask, frames, noise_image
from tests.helpers.models.shapes import every_family

GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)
CLIP = frames(5, 56, 84)
PAD = "<|vision_start|><|video_pad|><|vision_end|>"


def test_a_checkpoint_without_a_token_for_videos_refuses_them(copy_of, make_llm):
    """Its vocabulary ends before the token that its config names."""
    llm = make_llm(copy_of("gqa2-tied", config=lambda config: {**config, "video_token_id": 151656}))
    assert llm.generate_multimodal([ask(noise_image(64, 64), "What?")], GREEDY)[0].error is None
    for request in (ask(CLIP, "What?"), {"text": PAD, "videos": [CLIP]}):
        with pytest.raises(RequestError, match="this checkpoint has no token for videos, it cannot take them"):
            llm.generate_multimodal([request], GREEDY)


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize(
    "text, number, message",
    [
        (f"{PAD} and {PAD}", 1, "prompt has 2 video placeholders but 1 video was given"),
        (PAD, 2, "prompt has 1 video placeholder but 2 videos were given"),
        ("Describe this video.", 1, "prompt has 0 video placeholders but 1 video was given"),
        (PAD, 0, "prompt has 1 video placeholder but 0 videos were given"),
    ],
)
def test_another_number_of_videos_than_placeholders(text, number, message, checkpoint, make_llm):
    with pytest.raises(RequestError, match=message):
        make_llm(checkpoint).generate_multimodal([{"text": text, "videos": [CLIP] * number}], GREEDY)


@every_family
def test_token_ids_that_are_expanded_already(checkpoint, make_llm):
    """Qwen3-VL's have times, and start and end tokens, within the video's own."""
    llm = make_llm(checkpoint)
    prompt = llm.processor(ask("Of ", CLIP, " and ", noise_image(64, 64), "?"))
    data = {"image": noise_image(64, 64), "video": [CLIP]}
    again = llm.processor({"prompt_token_ids": prompt.token_ids, "multi_modal_data": data})
    assert again.token_ids == prompt.token_ids
    assert [item.placeholder for item in again.mm_items] == [item.placeholder for item in prompt.mm_items]
    assert (again.positions == prompt.positions).all()


@every_family
def test_errors_say_which_video_they_are_about(checkpoint, make_llm):
    llm = make_llm(checkpoint, max_model_len=50)
    thin, many = frames(2, 300, 1), frames(12, 96, 96)
    for videos, index, message in (
        ([CLIP, thin], 1, "a frame is 300x1 pixels: the long side may be at most 200 times the short one"),
        (
            [many],
            0,
            "12 frames of .* pixels are .* tokens, the maximum .* is 50 tokens .*; lower fps, num_frames or max_pixels",
        ),
        ([CLIP, []], 1, "the list of frames: is empty"),
        ([CLIP, CLIP[:1] + frames(1, 40, 40)], 1, "frame 1 of the list: is 40x40 pixels, frame 0 56x84"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            llm.generate_multimodal([{"text": PAD * len(videos), "videos": videos}], GREEDY)
        assert error.value.video_index == index
