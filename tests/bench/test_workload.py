"""Requests follow the arguments, are all different, and are reproducible with the same seed."""

import io

import pytest
from PIL import Image
from transformers import AutoTokenizer

from mmvllm.bench.workload import MIXED_SIZES, Workload, image_sizes
from mmvllm.models.folder import BUNDLED


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture
def make_workload(tokenizer):
    def make(sizes=((64, 48),), prompt_tokens=5, **options) -> Workload:
        return Workload(tokenizer, sizes=list(sizes), prompt_tokens=prompt_tokens, **options)

    return make


def images(requests: list[dict]) -> list[bytes]:
    return [part["image"] for request in requests for part in request["messages"][0]["content"] if "image" in part]


def texts(requests: list[dict]) -> list[str]:
    return [request["messages"][0]["content"][-1]["text"] for request in requests]


def test_all_images_are_different(make_workload):
    workload = make_workload()
    files = images(workload.requests(20)) + images(workload.requests(20))
    decoded = {Image.open(io.BytesIO(data)).convert("RGB").tobytes() for data in files}
    assert len(files) == len(decoded) == 40


def test_the_same_seed_makes_the_same_requests(make_workload):
    assert make_workload(seed=3).requests(5) == make_workload(seed=3).requests(5)
    assert not set(images(make_workload(seed=3).requests(5))) & set(images(make_workload(seed=4).requests(5)))


def test_sizes_are_used_in_turn(make_workload):
    files = images(make_workload(sizes=[(64, 48), (30, 90)]).requests(4))
    assert [Image.open(io.BytesIO(data)).size for data in files] == [(64, 48), (30, 90)] * 2


@pytest.mark.parametrize("prompt_tokens", [1, 7, 100])
def test_texts_have_about_the_given_length(prompt_tokens, make_workload, tokenizer):
    for text in texts(make_workload(prompt_tokens=prompt_tokens).requests(5)):
        assert prompt_tokens <= len(tokenizer(text)["input_ids"]) <= prompt_tokens + 5


@pytest.mark.parametrize(("share", "num_images"), [(0.0, 20), (0.25, 15), (0.5, 10), (1.0, 0)])
def test_share_of_requests_without_an_image(share, num_images, make_workload):
    assert len(images(make_workload(text_share=share).requests(20))) == num_images


def test_sizes_are_parsed_or_refused():
    assert image_sizes("448x300") == [(448, 300)]
    assert image_sizes("448x300, 20x30") == [(448, 300), (20, 30)]
    assert image_sizes("mixed") == MIXED_SIZES
    for text in ("448", "0x5", "448x", "big", "448x448,", "-1x4", "1e3x5"):
        with pytest.raises(ValueError, match="give width and height in pixels as in 448x448"):
            image_sizes(text)
