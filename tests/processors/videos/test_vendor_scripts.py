"""Scripts that prepare images and videos with qwen-vl-utils' `process_vision_info`: as if the messages were given."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.engine.requests import noise_image, patches_of
from tests.helpers.media.video_references import vision_info
from tests.helpers.media.videos import full_decode, make_clip
from tests.helpers.models.shapes import every_family

pytestmark = [
    every_family,
    pytest.mark.skipif(find_spec("qwen_vl_utils") is None, reason="qwen-vl-utils is not installed"),
    pytest.mark.spawns,
]


@pytest.fixture
def messages(tmp_path) -> list[dict]:
    image, videos = tmp_path / "a.png", [tmp_path / "a.mp4", tmp_path / "b.mp4"]
    noise_image(131, 90).save(image)
    for seed, video in enumerate(videos):
        make_clip(video, number=12, seed=seed)
    first, second = map(str, videos)
    parts = [
        {"type": "video", "video": first, "fps": 4},
        {"type": "text", "text": "and"},
        {"type": "image", "image": str(image)},
        {"type": "video", "video": second, "nframes": 4, "resized_height": 64, "resized_width": 64},
        {"type": "text", "text": "What is shown?"},
    ]
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]


@pytest.mark.parametrize("has_metadata", [True, False])
def test_the_script_for_offline_use(llm, messages, has_metadata):
    sources = {
        part["video"]: (np.stack([frame for _, frame in full_decode(Path(part["video"]))]), 8.0)
        for part in messages[1]["content"]
        if "video" in part
    }
    keys = {"return_video_kwargs": True, "return_video_metadata": has_metadata}
    images, videos, kwargs = vision_info(messages, llm.processor.image_processor.config.patch_size, sources, **keys)
    prompt = {
        "prompt": llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        "multi_modal_data": {"image": images, "video": videos},
        "mm_processor_kwargs": kwargs,
    }
    prepared, direct = llm.processor(prompt), llm.processor({"messages": messages})
    assert kwargs == {"do_sample_frames": False} | ({} if has_metadata else {"fps": [4.0, 8 / 3]})
    assert all(torch.equal(*pair) for pair in zip(patches_of(prepared), patches_of(direct), strict=True))
    if not has_metadata and llm.processor.rules.timestamp is not None:
        return  # the text has the times of the frames, which do not follow from a rate
    assert prepared.token_ids == direct.token_ids
    assert np.array_equal(prepared.positions, direct.positions)
    [generated], [answer] = llm.generate([prompt], {"max_tokens": 4}), llm.chat(messages, {"max_tokens": 4})
    assert generated.text == answer.text
