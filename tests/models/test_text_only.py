"""Text-only checkpoints generate the tokens of transformers and refuse images and videos."""

import pytest
import torch

from mmvllm import SamplingParams
from tests.helpers.engine.requests import ask, frames, noise_image
from tests.helpers.models.reference import assert_no_worse, first_logits
from tests.helpers.models.shapes import TEXT_SHAPES

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
PROMPTS = [[5, 9, 200, 31], [700], list(range(40, 77))]


@pytest.fixture(params=TEXT_SHAPES)
def shape(request) -> str:
    return request.param


@pytest.mark.thinned(1)
def test_text_only_checkpoint_generates_the_tokens_of_transformers(shape, checkpoints, reference, make_llm):
    outputs = make_llm(checkpoints(shape)).generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        want = reference(shape).model.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert output.token_ids == want[0, len(prompt) :].tolist()
        assert len(set(output.token_ids)) > 4  # not one token repeated


def test_the_error_of_the_logits_is_at_most_twice_that_of_transformers(shape, checkpoints, reference, make_llm):
    hf, inputs = reference(shape), {"input_ids": torch.tensor([PROMPTS[2]])}
    got = first_logits(make_llm(checkpoints(shape)).engine, inputs)
    assert_no_worse(got, hf.logits(inputs), hf.in_float64(hf.logits, inputs))


def test_text_only_checkpoint_takes_chats_and_refuses_images(shape, checkpoints, make_llm):
    llm = make_llm(checkpoints(shape), skip_warmup=False)
    (output,) = llm.generate_multimodal([ask("Hello")], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.token_ids) == 3
    with pytest.raises(ValueError, match="request 0: this checkpoint is text-only, it cannot take images"):
        llm.generate_multimodal([ask(noise_image(64, 64), "What?")])
    refused, fine = llm.generate_multimodal(
        [ask(noise_image(64, 64), "What?"), ask("Hello")],
        SamplingParams(max_tokens=3, ignore_eos=True),
        on_error="return",
    )
    assert "text-only" in refused.error and fine.token_ids == output.token_ids
    with pytest.raises(ValueError, match="request 0: this checkpoint is text-only, it cannot take videos"):
        llm.generate_multimodal([ask(frames(2, 64, 64), "What?")])


STRINGS = "{% for message in messages %}{{ message.role + ': ' + message.content.strip() }}\n{% endfor %}"


def test_a_template_that_takes_strings_gets_text_parts_as_one_string(checkpoints, make_llm):
    processor = make_llm(checkpoints("qwen3-mqa-untied")).processor
    processor.tokenizer.chat_template = STRINGS
    one = processor({"messages": [{"role": "user", "content": "Count the shapes."}]})
    assert processor(ask("Count ", "the ", "shapes.")).token_ids == one.token_ids
