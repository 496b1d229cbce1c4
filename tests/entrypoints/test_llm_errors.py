"""Invalid requests and prompts fail alone, with a message that names the request and the reason."""

import pytest
import torch

from mmvllm import RequestError, SamplingParams
from tests.helpers.engine.engines import assert_idle
from tests.helpers.engine.requests import ask, noise_image

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
GOOD = ask(noise_image(80, 60), "Describe this image.")


def test_an_exception_in_the_processor_fails_only_its_request(llm):
    class Failing:
        def apply_chat_template(self, messages, **options):
            return "text"

        def __call__(self, text, images, return_tensors):
            if images:
                raise RuntimeError("cannot process")
            return {"input_ids": torch.tensor([[5, 6]])}

    outputs = llm.generate_multimodal([ask("x"), GOOD, ask("y")], SHORT, processor=Failing(), on_error="return")
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[1].error == "preparation failed: RuntimeError: cannot process"


def test_a_completion_with_every_token_forbidden_is_an_error(llm):
    def forbid_all(token_ids, logits):
        return torch.full_like(logits, -torch.inf)

    params = SamplingParams(temperature=1.0, logits_processors=[forbid_all])
    output = llm.generate_multimodal([GOOD], params, on_error="return")[0]
    assert "every token is forbidden" in output.error


@pytest.mark.parametrize("params", [{"stop_token_ids": range(768)}, {"stop_token_ids": [5], "allowed_token_ids": [5]}])
def test_min_tokens_of_which_each_would_end_the_completion_are_refused(params, llm):
    message = "min_tokens is 2, but every token that is allowed ends the completion; lower it"
    with pytest.raises(RequestError, match=message) as refused:
        llm.generate_multimodal([GOOD], SamplingParams(min_tokens=2, max_tokens=4, **params))
    assert refused.value.param == "min_tokens"
    assert llm.generate_multimodal([GOOD], SamplingParams(min_tokens=0, max_tokens=4, **params))[0].text is not None


BAD = {
    "no messages": ({"messages": None}, "'messages' must be a list"),
    "no such file": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "/no/such.png"}]}]},
        "image 0: .*no such file",
    ),
    "second image": (ask(noise_image(50, 50), b"\x89PNG nonsense", "x"), "image 1: .*not an image"),
    "narrow": (ask(noise_image(1, 1000), "x"), "image 0: .*long side"),
    "too many placeholders": (
        {"text": "<|vision_start|><|image_pad|><|vision_end|><|image_pad|>", "images": [noise_image(50, 50)]},
        r"1 image placeholder, 1 <\|image_pad\|> outside .* but 1 image was given",
    ),
    "too few placeholders": (
        {"text": "<|image_pad|>", "images": [noise_image(50, 50), noise_image(60, 50)]},
        r"0 image placeholders, 1 <\|image_pad\|> outside .* but 2 images were given",
    ),
    "literal placeholder": (
        ask("look: <|image_pad|>", allow_special_tokens=True),
        r"0 image placeholders, 1 <\|image_pad\|> outside .* but 0 images were given",
    ),
    "empty prompt": ({"text": ""}, "prompt is empty"),
    "too long": (
        ask("shape " * 2000),
        r"prompt has \d+ tokens and .* at least one, the maximum context length is 1024 tokens",
    ),
    "too long, with an image": (
        ask(noise_image(60, 60), "shape " * 2000),
        r"prompt has \d+ tokens \(\d+ of them from images\) and .* shorten it, lower max_pixels or raise max_model_len",
    ),
    "unknown key": ({"message": "x"}, "unknown keys message"),
    "not a dict": ("describe", "must be a dict"),
    "bad parameters": (ask("x", sampling_params={"temprature": 1}), "temprature"),
    "bad request_id": (ask("x", request_id=5), r"request_id must be str \| None, got 5"),
    "request_id without a hash": (ask("x", request_id=["a"]), r"request_id must be str \| None, got \['a'\]"),
    "bad priority": (ask("x", priority="high"), "priority must be int, got 'high'"),
    "bad salt": (ask("x", cache_salt=b"x"), "cache_salt must be .*, got b'x'"),
    "bad value": (ask("x", sampling_params={"temperature": -1}), "temperature must be .*, got -1"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_request_is_returned_or_raised_and_does_not_affect_others(name, llm):
    bad, message = BAD[name]
    want = llm.generate_multimodal([GOOD], SHORT)[0].token_ids
    outputs = llm.generate_multimodal([GOOD, bad, GOOD], SHORT, on_error="return")
    assert [output.token_ids for output in outputs] == [want, [], want]
    assert outputs[1].finish_reason == "error" and outputs[0].error is None
    with pytest.raises(ValueError, match=message):
        raise ValueError(outputs[1].error)
    with pytest.raises(ValueError, match="request 1: .*" + message):
        llm.generate_multimodal([GOOD, bad, GOOD], SHORT)
    assert_idle(llm)
    assert llm.generate_multimodal([GOOD], SHORT)[0].token_ids == want


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([5, 768], r"token ids of a prompt must be integers in \[0, 768\), got 768"),
        ([5, -1], "token ids of a prompt must be .*, got -1"),
        ([5, "a"], "token ids of a prompt must be .*, got 'a'"),
        (7, "must be a string or a list of token ids"),
        ([1] * 1024, "prompt has 1024 tokens"),
    ],
)
def test_invalid_prompts_are_named_by_index(prompt, message, llm):
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        llm.generate(["fine", prompt], SHORT)


def test_on_error_is_validated(llm):
    with pytest.raises(ValueError, match=r"on_error must be .*, got 'ignore'"):
        llm.generate_multimodal([GOOD], SHORT, on_error="ignore")


def test_too_few_sampling_params_are_refused(llm):
    with pytest.raises(ValueError, match="request 1: 1 sampling_params were given"):
        llm.generate_multimodal([GOOD, GOOD], [SHORT])


def test_a_failed_step_fails_its_requests_and_not_later_ones(llm, monkeypatch):
    want = llm.generate_multimodal([GOOD], SHORT)[0].token_ids

    def out_of_memory(*arguments):
        monkeypatch.undo()
        raise torch.OutOfMemoryError("tried to allocate 8 GiB")

    monkeypatch.setattr(llm.engine.model_runner, "run", out_of_memory)
    failed = llm.generate_multimodal([GOOD], SHORT, on_error="return")[0]
    assert failed.finish_reason == "error" and "tried to allocate 8 GiB" in failed.error
    assert llm.generate_multimodal([GOOD], SHORT)[0].token_ids == want
    monkeypatch.setattr(llm.engine.model_runner, "run", out_of_memory)
    with pytest.raises(RuntimeError, match="request 0: the step failed: OutOfMemoryError"):
        llm.generate_multimodal([GOOD], SHORT)
