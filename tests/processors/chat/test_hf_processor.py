"""A processor of the caller's: transformers' real class, tensors on another device, reused buffers, wrong returns."""

import asyncio

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.demo.page import build_page
from mmvllm.demo.settings import DemoSettings
from mmvllm.errors import RequestError
from mmvllm.models.folder import BUNDLED
from mmvllm.models.registry import load_media_configs
from mmvllm.processors.chat.hf_processor import HFProcessor
from tests.helpers.engine.engines import run_at_once
from tests.helpers.engine.requests import ask, grids_of, noise_image, patches_of
from tests.helpers.serving.server import CHAT, make_app
from tests.processors.chat.foreign import real_processor

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
A, B = noise_image(90, 60, 1), noise_image(60, 120, 2)
QUESTIONS = [ask(A, "What?"), ask("One ", A, " two ", B, " which?"), ask("No image.")]
ENGINE = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 256, "skip_warmup": True}


class OnAnotherDevice(torch.Tensor):
    """A tensor that numpy cannot read until it is copied to the host, like one on a GPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func not in (torch.Tensor.cpu, torch.Tensor.to):
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return result.as_subclass(torch.Tensor)


class Changed:
    """transformers' processor, whose results are changed by `change`."""

    def __init__(self, folder, change):
        self.inner, self.change = real_processor(folder), change
        self.apply_chat_template = self.inner.apply_chat_template

    def __call__(self, **arguments):
        made = dict(self.inner(**arguments))
        return self.change(made) or made


class PickyChange(Changed):
    """Changes only what has images."""

    def __call__(self, **arguments):
        return super().__call__(**arguments) if arguments["images"] else self.inner(**arguments)


def moved(made: dict) -> dict:
    return {name: value.as_subclass(OnAnotherDevice) for name, value in made.items()}


@pytest.fixture
def llm(checkpoint, make_llm):
    return make_llm(checkpoint)


def tokens_of(llm, questions=QUESTIONS, **options) -> list[list[int]]:
    return [output.token_ids for output in llm.generate_multimodal(questions, SHORT, use_tqdm=False, **options)]


def test_transformers_own_class_gives_the_same_completions(checkpoint, make_llm, llm):
    want = tokens_of(llm)
    assert tokens_of(llm, processor=real_processor(checkpoint)) == want
    assert tokens_of(make_llm(checkpoint, processor=real_processor(checkpoint))) == want


def test_tensors_on_another_device_are_taken_from_callers_too(checkpoint, llm):
    prompt = llm.processor(QUESTIONS[1])
    patches = torch.cat(patches_of(prompt)).as_subclass(OnAnotherDevice)
    grids = torch.tensor(grids_of(prompt)).as_subclass(OnAnotherDevice)
    ids = torch.tensor(prompt.token_ids).as_subclass(OnAnotherDevice)
    llm.add_request(ids, SHORT, pixel_values=patches, image_grid_thw=grids)
    outputs = []
    while not llm.engine.is_finished():
        outputs += llm.step()[0]
    assert outputs[0].token_ids == tokens_of(llm, [QUESTIONS[1]])[0]


def test_a_processor_may_reuse_its_buffers(checkpoint, make_llm, llm):
    buffers = {}

    def reused(made):
        for name, value in made.items():
            buffer = buffers.setdefault(name, torch.zeros(4096, value.shape[1], dtype=value.dtype))
            rows = buffer[: len(value)] if value.shape[1] == buffer.shape[1] else value
            rows[:] = value
            made[name] = rows

    questions = [ask(noise_image(90, 60, seed), "What?") for seed in range(6)]
    theirs = make_llm(checkpoint, processor=Changed(checkpoint, reused))
    want = run_at_once(llm, questions)
    assert run_at_once(theirs, questions) == want
    assert len({tuple(tokens) for tokens in want}) > 1, "the images must make a difference"
    assert run_at_once(theirs, questions) == want, "cached embeddings must belong to the right pixels"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda made: made.update(image_grid_thw=made["image_grid_thw"][0]), r"must have shape .*, got \(3,\)"),
        (lambda made: made.update(pixel_values=made["pixel_values"].int()), "dtype torch.int32"),
        (lambda made: made.update(input_ids=made["input_ids"].float()), "must be integers in one row"),
    ],
)
def test_malformed_returns_are_refused_and_other_requests_finish(change, message, checkpoint, llm):
    with pytest.raises(RequestError, match=message):
        llm._preparer.adapt(Changed(checkpoint, change))(QUESTIONS[0])
    outputs = llm.generate_multimodal(
        [QUESTIONS[0], {"text": "fine"}], SHORT, processor=PickyChange(checkpoint, change), on_error="return"
    )
    assert outputs[0].error is not None and "preparation failed" not in outputs[0].error
    assert outputs[1].error is None and len(outputs[1].token_ids) == 6


def test_token_ids_without_images_need_no_processor(checkpoint, make_llm):
    theirs = make_llm(checkpoint, processor=real_processor(checkpoint))
    text = "<|vision_start|><|image_pad|><|vision_end|>What?"
    prompts = [{"prompt": text, "multi_modal_data": {"image": A}}, [5, 6], {"prompt_token_ids": np.array([5, 6])}]
    outputs = theirs.generate(prompts, SHORT, use_tqdm=False)
    assert outputs[1].token_ids == outputs[2].token_ids and outputs[0].num_image_tokens > 0
    with pytest.raises(RequestError, match="prompt 0: a processor of your own needs a prompt with media as text"):
        theirs.generate({"prompt_token_ids": [5], "multi_modal_data": {"image": A}}, SHORT)


def test_plain_strings_need_no_processor(checkpoint, make_llm, llm):
    class ForImages:
        def __call__(self, **arguments):
            raise AssertionError("a prompt without a template and images was given to the processor")

    theirs, question = make_llm(checkpoint, processor=ForImages()), "What is this?"
    want = llm.generate(question, SHORT)[0].token_ids
    assert theirs.generate(question, SHORT)[0].token_ids == want


def test_a_text_only_model_takes_token_ids_beside_a_processor(llm):
    adapted = HFProcessor(None, llm.tokenizer, None, None)
    assert adapted({"prompt_token_ids": (5, 6)}).token_ids == [5, 6]


def test_async_llm_and_the_demo_page_take_a_processor(checkpoint, llm):
    async def answers() -> list[list[int]]:
        async with AsyncLLM(checkpoint, processor=Changed(checkpoint, moved), **ENGINE) as engine:
            assert build_page(engine, DemoSettings()) is not None
            outputs = []
            for question in QUESTIONS:
                deltas = [delta async for delta in engine.generate(question, SHORT)]
                outputs.append(deltas[-1].output.token_ids)
            return outputs

    assert asyncio.run(answers()) == tokens_of(llm)


@pytest.mark.spawns
def test_the_server_takes_a_processor():
    calls = []
    engine = AsyncLLM(processor=Changed(BUNDLED, lambda made: calls.append(sorted(made))), **ENGINE)
    message = {"role": "user", "content": "Count."}
    with TestClient(make_app(engine)) as client:
        response = client.post(CHAT, json={"model": "bundled", "messages": [message], "max_tokens": 3})
    assert response.status_code == 200, response.text
    assert len(calls) == 1 and "input_ids" in calls[0]
    asyncio.run(engine.shutdown())


def test_sizes_of_images_are_known(checkpoint, make_llm):
    """Boxes are placed by them."""
    llm = make_llm(checkpoint)
    own = [item.geometry for item in llm.processor(QUESTIONS[1]).mm_items]
    llm = make_llm(checkpoint, processor=real_processor(checkpoint))
    assert [item.geometry for item in llm.processor(QUESTIONS[1]).mm_items] == own
    assert [(one.width, one.height) for one in own] == [A.size, B.size]


@pytest.mark.parametrize("make", [ask, lambda text: {"text": text}])
def test_half_of_a_surrogate_pair_is_a_replacement_character(make):
    processor = real_processor(BUNDLED)
    foreign = HFProcessor(processor, processor.tokenizer, None, load_media_configs(BUNDLED)[1])
    assert foreign(make("a\ud83d b")).token_ids == foreign(make("a\ufffd b")).token_ids
