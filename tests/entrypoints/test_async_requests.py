"""Requests in other forms through `AsyncLLM`; arrays that the caller reuses at once."""

import asyncio
import collections
import threading

import numpy as np
import pytest
import torch

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.errors import RequestError
from tests.helpers.engine.engines import assert_engine_idle
from tests.helpers.engine.requests import ask, noise_image

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
ENGINE = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 128, "skip_warmup": True}
IMAGE = noise_image(90, 60)
TEXT = "<|vision_start|><|image_pad|><|vision_end|>What?"


@pytest.fixture(scope="module")
def engine(checkpoint):
    engine = AsyncLLM(checkpoint, **ENGINE)
    yield engine
    asyncio.run(engine.shutdown())
    assert_engine_idle(engine._engine)


async def finished(engine: AsyncLLM, request):
    return [delta async for delta in engine.generate(request, SHORT)][-1].output


def output_of(engine: AsyncLLM, request):
    return asyncio.run(finished(engine, request))


def test_prompts_as_vllm_takes_them(engine, checkpoint, make_llm):
    prompt = {"prompt": TEXT, "multi_modal_data": {"image": np.asarray(IMAGE)}}
    want = make_llm(checkpoint).generate([prompt, [5, 6]], SHORT)
    assert output_of(engine, prompt).token_ids == want[0].token_ids
    for ids in ([5, 6], (5, 6), np.array([5, 6]), torch.tensor([5, 6]), {"prompt_token_ids": np.array([5, 6])}):
        output = output_of(engine, ids)
        assert output.token_ids == want[1].token_ids and output.prompt_token_ids == [5, 6]


BAD = {
    "UserDict": (collections.UserDict({"prompt": "x"}), "a request must be a dict .*, got UserDict"),
    "bytes": (b"abc", "got bytes"),
    "None": (None, "got NoneType"),
    "floats": (np.array([5.0]), "token ids of a prompt must be integers in one row"),
    "floats in a dict": ({"prompt_token_ids": np.array([5.0])}, "token ids of a prompt must be integers in one row"),
    "two rows": (np.array([[5, 6]]), "token ids of a prompt must be integers in one row"),
    "images beside messages": (
        {**ask({"type": "image"}), "multi_modal_data": {"image": [IMAGE, IMAGE]}},
        r"messages have 1 part \{'type': 'image'\} without a source, and 2 images beside them",
    ),
    "unknown key": ({**ask("x"), "nonsense": 1}, "unknown keys nonsense"),
    "parameters in a list": ({**ask("x"), "sampling_params": [SHORT]}, "must be SamplingParams or a dict, got list"),
}


@pytest.mark.parametrize("name", BAD)
def test_other_requests_are_refused(name, engine):
    request, message = BAD[name]
    with pytest.raises(RequestError, match=message):
        output_of(engine, request)
    assert engine.stats().num_running == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_token_ids_are_copied_before_a_worker_prepares_them(wrapped, engine, monkeypatch):
    """The preparation waits until the caller has overwritten its array."""
    may_prepare, prepare = threading.Event(), engine._preparer.prepare

    def wait_and_prepare(*arguments):
        assert may_prepare.wait(20)
        return prepare(*arguments)

    monkeypatch.setattr(engine._preparer, "prepare", wait_and_prepare)
    ids = np.array([5, 6, 7])

    async def online():
        task = asyncio.create_task(finished(engine, {"prompt_token_ids": ids} if wrapped else ids))
        while not engine._streams:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        ids[:] = 0
        may_prepare.set()
        return await task

    assert asyncio.run(online()).prompt_token_ids == [5, 6, 7]
