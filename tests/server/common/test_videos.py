"""Videos of chat requests: sources, options and completions."""

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmvllm import LLM, SamplingParams
from mmvllm.config import MiB
from mmvllm.media.policy import MediaPolicy
from mmvllm.server.settings import ServerSettings
from tests.helpers.media.images import encode
from tests.helpers.media.videos import make_clip, moving
from tests.helpers.serving.server import (
    CHAT,
    SCENES,
    answered,
    chat,
    data_uri,
    image_part,
    make_app,
    user,
    video_part,
    video_uri,
)
from tests.server.refusals import refusal

QUESTION = "What happens here?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("clips")


@pytest.fixture(scope="module")
def clip(folder) -> Path:
    """3 seconds, 24 frames."""
    return make_clip(folder / "a.mp4")


def offline(llm: LLM, *parts: str | dict, max_tokens: int = 256, **keys):
    """The greedy output of `LLM` for one turn."""
    request = {"messages": [user(*parts)], **keys}
    return llm.generate_multimodal([request], SamplingParams(max_tokens=max_tokens), use_tqdm=False)[0]


def create(client, *parts: str | dict, **keys):
    body = chat(*parts, **keys)
    extras = {name: body.pop(name) for name in ("mm_processor_kwargs", "max_pixels", "ignore_eos") if name in body}
    return client.chat.completions.create(**body, extra_body=extras)


@pytest.mark.spawns
@pytest.mark.parametrize(("name", "codec", "pix_fmt"), [("a.webm", "libvpx-vp9", "yuv420p"), ("a.gif", "gif", "rgb8")])
def test_the_completion_equals_that_of_llm(client, bundled_llm, tmp_path, name, codec, pix_fmt):
    path = make_clip(tmp_path / name, codec=codec, pix_fmt=pix_fmt)
    expected = offline(bundled_llm, {"type": "video", "video": str(path)}, QUESTION)
    answer = create(client, video_part(video_uri(path)), QUESTION)
    assert answer.choices[0].message.content == expected.text
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.num_prompt_tokens, len(expected.token_ids))
    details = usage.prompt_tokens_details.model_dump()
    assert (details["video_tokens"], details["image_tokens"]) == (expected.num_video_tokens, 0)
    assert expected.num_video_tokens > 0


@pytest.mark.spawns
def test_streams_and_several_choices_have_the_same_text(client, bundled_llm, clip):
    expected = offline(bundled_llm, {"type": "video", "video": str(clip)}, QUESTION).text
    stream = create(client, video_part(video_uri(clip)), QUESTION, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage.prompt_tokens_details.model_dump()["video_tokens"] > 0
    answer = create(client, video_part(video_uri(clip)), QUESTION, n=2)
    assert [choice.message.content for choice in answer.choices] == [expected] * 2


@pytest.mark.spawns
def test_videos_and_images_and_text_in_any_order(client, bundled_llm, folder, clip):
    other = make_clip(folder / "b.mp4", number=9, fps=4, size=(90, 60), seed=3)
    image = Image.open(SCENES[0])
    theirs = [
        *("First:", video_part(video_uri(clip)), image_part(data_uri()), "then"),
        *(video_part(video_uri(other), nframes=4), image_part(data_uri(SCENES[1])), QUESTION),
    ]
    ours = [
        *("First:", {"type": "video", "video": str(clip)}, {"type": "image", "image": image}, "then"),
        *({"type": "video", "video": str(other), "nframes": 4}, {"type": "image", "image": SCENES[1]}, QUESTION),
    ]
    expected = offline(bundled_llm, *ours)
    answer = create(client, *theirs)
    assert answer.choices[0].message.content == expected.text
    details = answer.usage.prompt_tokens_details.model_dump()
    assert details["video_tokens"] == expected.num_video_tokens
    assert details["image_tokens"] == expected.num_image_tokens > 0


@pytest.mark.spawns
def test_a_conversation_about_a_video_continues_from_the_cache(client, clip):
    turns = [user(video_part(video_uri(clip)), QUESTION)]
    for _ in range(2):
        answer = client.chat.completions.create(model="bundled", messages=turns, temperature=0)
        turns += [answer.choices[0].message, user("And then?")]
    details = answer.usage.prompt_tokens_details.model_dump()
    assert details["cached_tokens"] > details["video_tokens"] > 0


@pytest.mark.spawns
@pytest.mark.parametrize(
    "options",
    [
        {"fps": 0.5, "min_frames": 2},
        {"nframes": 6},
        {"max_frames": 4, "video_start": 1, "video_end": 2.5},
        {"min_pixels": 28 * 28 * 20, "max_pixels": 28 * 28 * 30, "total_pixels": 28 * 28 * 400},
    ],
    ids=str,
)
def test_options_of_a_part_are_those_of_qwen_vl_utils(client, bundled_llm, clip, options):
    expected = offline(bundled_llm, {"type": "video", "video": str(clip), **options}, QUESTION, max_tokens=4)
    answer = create(client, video_part(video_uri(clip), **options), QUESTION, max_tokens=4)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens_details.model_dump()["video_tokens"] == expected.num_video_tokens


@pytest.mark.spawns
@pytest.mark.parametrize(
    "kwargs",
    [
        {"fps": [4.0], "size": {"shortest_edge": 30000, "longest_edge": 35000}},  # as the vendors' processors have it
        {"num_frames": 10},
        {"do_sample_frames": False},
    ],
    ids=str,
)
def test_processor_kwargs_are_those_of_the_request(client, bundled_llm, clip, kwargs):
    image, keys = Image.open(SCENES[0]), {"mm_processor_kwargs": kwargs}
    ours = [{"type": "video", "video": str(clip)}, {"type": "image", "image": image}]
    expected = offline(bundled_llm, *ours, QUESTION, max_tokens=4, **keys)
    answer = create(client, video_part(video_uri(clip)), image_part(data_uri()), QUESTION, max_tokens=4, **keys)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens


@pytest.mark.spawns
def test_a_requests_own_bounds_are_for_images_only(client, clip):
    def tokens(**keys) -> tuple[int, int]:
        parts = video_part(video_uri(clip)), image_part(data_uri(SCENES[0]))
        usage = create(client, *parts, QUESTION, max_tokens=1, **keys).usage.prompt_tokens_details.model_dump()
        return usage["video_tokens"], usage["image_tokens"]

    (videos, images), (same, fewer) = tokens(), tokens(max_pixels=28 * 28 * 25)
    assert videos == same and fewer < images


@pytest.mark.spawns
def test_frames_as_jpegs_are_a_video(client, bundled_llm):
    frames = [Image.fromarray(one) for one in moving(6, 56, 84)]
    data = [encode(frame, "JPEG") for frame in frames]
    uri = "data:video/jpeg;base64," + ",".join(base64.b64encode(one).decode() for one in data)
    expected = offline(bundled_llm, {"type": "video", "video": data, "fps": 4}, QUESTION)
    answer = create(client, video_part(uri, fps=4), QUESTION)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens_details.model_dump()["video_tokens"] == expected.num_video_tokens > 0


@pytest.mark.spawns
def test_a_body_has_room_for_the_largest_video(engine, folder):
    clip = make_clip(
        folder / "large.mp4", number=8, frames=np.random.default_rng(0).integers(0, 255, (8, 320, 480, 3), np.uint8)
    )
    size = clip.stat().st_size
    app = make_app(engine, media=MediaPolicy(max_video_bytes=size))
    answered(app, CHAT, chat(video_part(video_uri(clip)), max_tokens=1))
    error = refusal(app, CHAT, chat(video_part(video_uri(clip.read_bytes() + bytes(3))), max_tokens=1))
    assert f"at most {size} bytes" in error["message"]


def test_the_default_size_of_a_body_follows_from_that_of_a_video():
    settings = ServerSettings(model_names=("m",), media=MediaPolicy(max_video_bytes=300 * MiB))
    assert settings.body_bytes(takes_videos=True) == (32 + 400) * MiB
    assert settings.body_bytes(takes_videos=False) == 32 * MiB
    assert replace(settings, max_body_bytes=7).body_bytes(takes_videos=True) == 7
