"""Sampling parameters that a request leaves out are the checkpoint's own, unless the server ignores those."""

import asyncio
from itertools import product

import pytest

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.server.chat.protocol import ChatRequest
from mmvllm.server.chat.serving import chat_job, chat_params
from mmvllm.server.completions.protocol import CompletionRequest
from mmvllm.server.completions.serving import completion_job, completion_params
from tests.helpers.models.generation import bundled_with
from tests.helpers.serving.server import ENGINE, chat, served, user

OWN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "min_p": 0.1, "presence_penalty": 1.5}
GIVEN = {"temperature": 0.0, "top_p": 0.3, "top_k": 0, "repetition_penalty": 1.2, "min_p": 0.0, "presence_penalty": 0.0}
NEUTRAL = {name: getattr(SamplingParams(), name) for name in OWN} | {"temperature": 1.0}
CHAT_BODY = {"model": "m", "messages": [user("Hi")], "max_tokens": 5}
COMPLETION_BODY = {"model": "m", "prompt": "Hi", "max_tokens": 5}


@pytest.fixture(scope="module")
def engine_with(tmp_path_factory):
    made = {}

    def make(generation: dict) -> AsyncLLM:
        key = str(generation)
        if key not in made:
            made[key] = AsyncLLM(bundled_with(tmp_path_factory.mktemp("models") / "model", generation), **ENGINE)
        return made[key]

    yield make
    for engine in made.values():
        asyncio.run(engine.shutdown(drain=False))


def both(engine: AsyncLLM, uses_generation_config: bool = True, **given) -> SamplingParams:
    """The parameters of a chat and of a completion with these fields, which are equal."""
    serving = served(engine, model_names=("m",), uses_generation_config=uses_generation_config)
    chat = chat_job(serving, ChatRequest(**CHAT_BODY, **given), reservation=None).params
    assert completion_job(serving, CompletionRequest(**COMPLETION_BODY, **given)).params == chat
    return chat


@pytest.mark.parametrize("is_given", [*product((False, True, None), repeat=3)])
def test_what_a_request_gives_comes_before_what_the_checkpoint_gives(is_given, engine_with):
    """Every combination of three pairs of fields that are given, left out, or null."""
    engine, names = engine_with(OWN), [*OWN]
    chosen = dict(zip(names, is_given * 2, strict=True))
    given = {name: GIVEN[name] if state else None for name, state in chosen.items() if state is not False}
    want = {name: GIVEN[name] if chosen[name] else OWN[name] for name in names}
    assert both(engine, **given) == SamplingParams(**want, max_tokens=5)
    want = {name: GIVEN[name] if chosen[name] else NEUTRAL[name] for name in names}
    assert both(engine, uses_generation_config=False, **given) == SamplingParams(**want, max_tokens=5)


@pytest.mark.parametrize("name", OWN)
def test_one_field_leaves_the_others_to_the_checkpoint(name, engine_with):
    want = SamplingParams(**OWN | {name: GIVEN[name]}, max_tokens=5)
    assert both(engine_with(OWN), **{name: GIVEN[name]}) == want


def test_the_limit_of_a_completion_does_not_follow_the_checkpoint(engine_with):
    engine = engine_with({"max_new_tokens": 7, "temperature": 0.5})
    serving = served(engine, model_names=("m",))
    chat, completion = ChatRequest(**CHAT_BODY | {"max_tokens": None}), CompletionRequest(model="m", prompt="Hi")
    assert chat_job(serving, chat, reservation=None).params.max_tokens == engine.max_model_len
    assert completion_job(serving, completion).params.max_tokens == 16


def test_do_sample_false_is_greedy_unless_a_request_gives_a_temperature(engine_with):
    engine = engine_with({"do_sample": False, "temperature": 0.9})
    assert both(engine).temperature == 0
    assert both(engine, top_p=0.5).temperature == 0
    assert both(engine, temperature=0.4).temperature == 0.4


def test_default_parameters_are_those_of_openai():
    del (body := chat("Hi"))["temperature"]
    assert chat_params(ChatRequest(**body), 99) == SamplingParams(temperature=1.0, max_tokens=99)
    assert completion_params(CompletionRequest(model="m", prompt="Hi"), 99) == SamplingParams(
        temperature=1.0, max_tokens=16
    )


def test_every_parameter_reaches_the_engine():
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "n": 3,
        "seed": -4,
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "min_tokens": 2,
        "max_tokens": 10,
        "ignore_eos": True,
    }
    assert chat_params(ChatRequest(**chat("Hi", **given, logprobs=True, top_logprobs=4)), 99) == SamplingParams(
        **given, logprobs=4
    )
    assert completion_params(CompletionRequest(model="m", prompt="", **given), 99) == SamplingParams(**given)


@pytest.mark.parametrize("names", [["max_tokens"], ["max_completion_tokens"], ["max_tokens", "max_completion_tokens"]])
def test_equal_limits_under_both_names_are_accepted(names):
    assert chat_params(ChatRequest(**chat("Hi", **dict.fromkeys(names, 5))), 99).max_tokens == 5
