"""The `openai` client and a real server."""

import asyncio
import math
from pathlib import Path

import openai
import pytest

from mmvllm import SamplingParams
from tests.helpers.engine.requests import ask
from tests.helpers.serving.server import SCENES, chat, data_uri, image_part, user

QUESTION = "Describe this image."


@pytest.fixture(scope="module")
def offline(bundled_llm):
    """Greedy outputs of `LLM`."""

    def answer(*requests: dict, **params) -> list:
        return bundled_llm.generate_multimodal(requests, SamplingParams(**params), use_tqdm=False)

    return answer


def create(client, *parts, **keys):
    body = chat(*parts, **keys)
    extras = {name: body.pop(name) for name in ("ignore_eos",) if name in body}
    return client.chat.completions.create(**body, extra_body=extras)


def streamed(stream) -> tuple[list[str], list[str | None], list]:
    """Texts and finish reasons by choice, and the usage of each chunk."""
    texts, reasons, usages = {}, {}, []
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk" and chunk.model == "bundled"
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    return [texts[i] for i in sorted(texts)], [reasons[i] for i in sorted(reasons)], usages


@pytest.mark.essential
@pytest.mark.spawns
def test_completions_equal_those_of_llm_streamed_or_not(client, offline):
    [expected] = offline(ask(SCENES[0], QUESTION))
    part = image_part(data_uri())
    whole = create(client, part, QUESTION)
    [choice] = whole.choices
    assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-") and whole.model == "bundled"
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected.text, "stop")
    assert whole.usage.prompt_tokens == expected.num_prompt_tokens
    assert whole.usage.completion_tokens == len(expected.token_ids)
    assert whole.usage.total_tokens == expected.num_prompt_tokens + len(expected.token_ids)
    assert whole.usage.prompt_tokens_details.image_tokens == expected.num_image_tokens > 0
    texts, reasons, usages = streamed(create(client, part, QUESTION, stream=True))
    assert (texts, reasons) == ([expected.text], ["stop"])
    assert not any(usages)


def test_include_usage_adds_a_last_chunk_with_usage(client):
    stream = create(client, "Hello", stream=True, stream_options={"include_usage": True}, max_tokens=5, ignore_eos=True)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.spawns
def test_concurrent_requests_get_their_own_completions(running, offline):
    expected = [output.text for output in offline(*(ask(scene, QUESTION) for scene in SCENES[:6]))]

    async def ask_all() -> list[str]:
        options = {"base_url": f"{running.url}/v1", "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as client:
            return await asyncio.gather(*(answer(client, scene) for scene in SCENES[:6]))

    async def answer(client, scene: Path) -> str:
        stream = await client.chat.completions.create(**chat(image_part(data_uri(scene)), QUESTION), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask_all()) == expected
    assert len(set(expected)) > 1


@pytest.mark.spawns
def test_a_conversation_continues_with_its_completions(client, offline):
    question = ask(SCENES[0], QUESTION)["messages"][0]
    turns = [question, {"role": "assistant", "content": "A star."}, {"role": "user", "content": "How many stars?"}]
    [expected] = offline({"messages": [{"role": "system", "content": "Be brief."}, *turns]})
    first = user(image_part(data_uri()), QUESTION)
    answer = client.chat.completions.create(
        model="bundled", messages=[{"role": "developer", "content": "Be brief."}, first, *turns[1:]], temperature=0
    )
    assert answer.choices[0].message.content == expected.text
    again = client.chat.completions.create(
        model="bundled",
        messages=[first, answer.choices[0].message, {"role": "user", "content": "And now?"}],
        temperature=0,
    )
    assert again.choices[0].finish_reason == "stop"


def test_choices_differ_and_a_seed_reproduces_them(client):
    keys = {"n": 3, "temperature": 2.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    first, second = (create(client, "Hello", **keys) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2] and len(set(texts)) > 1
    assert texts == [choice.message.content for choice in second.choices]
    assert first.usage.completion_tokens == 36
    assert streamed(create(client, "Hello", **keys, stream=True))[0] == texts
    assert texts != [choice.message.content for choice in create(client, "Hello", **keys | {"seed": 8}).choices]


@pytest.mark.spawns
@pytest.mark.parametrize("streams", [False, True])
def test_a_completion_ends_before_a_stop_string(client, offline, streams):
    part = image_part(data_uri())
    text = offline(ask(SCENES[0], QUESTION))[0].text
    stop = text[len(text) // 2 :][:4]
    answer = create(client, part, QUESTION, stop=["not in the text", stop], stream=streams)
    got = streamed(answer)[:2] if streams else ([answer.choices[0].message.content], [answer.choices[0].finish_reason])
    assert got == ([text[: text.index(stop)]], ["stop"])
    [choice] = create(client, part, QUESTION, stop=stop).choices
    assert choice.message.content == text[: text.index(stop)] and choice.stop_reason == stop


@pytest.mark.spawns
@pytest.mark.parametrize("streams", [False, True])
def test_every_token_has_logprobs(client, offline, streams):
    [expected] = offline(ask(SCENES[0], QUESTION), logprobs=2)
    answer = create(client, image_part(data_uri()), QUESTION, logprobs=True, top_logprobs=2, stream=streams)
    if streams:
        logprobs = [chunk.choices[0].logprobs for chunk in answer]
        entries = [entry for one in logprobs if one is not None for entry in one.content]
    else:
        entries = answer.choices[0].logprobs.content
    assert len(entries) == len(expected.token_ids)
    for entry, reference in zip(entries, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(next(iter(reference.values())), abs=1e-3)
        assert [top.logprob for top in entry.top_logprobs] == sorted(top.logprob for top in entry.top_logprobs)[::-1]
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token  # greedy
        assert bytes(entry.bytes).decode() == entry.token
    assert "".join(entry.token for entry in entries[:-1]) == expected.text  # without the end-of-sequence token


def test_logprobs_without_top_logprobs_are_those_of_the_sampled_tokens(client):
    [choice] = create(client, "Hello", logprobs=True, max_tokens=4, ignore_eos=True).choices
    assert [entry.top_logprobs for entry in choice.logprobs.content] == [[]] * 4
    assert all(-math.inf < entry.logprob <= 0 for entry in choice.logprobs.content)


def test_completions_accept_prompts_of_any_shape(client, running):
    ids = running.engine.tokenizer("A small", add_special_tokens=False)["input_ids"]
    keys = {"model": "bundled", "temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    [text] = [choice.text for choice in client.completions.create(prompt="A small", **keys).choices]
    assert client.completions.create(prompt=ids, **keys).choices[0].text == text
    for prompt in (["A large", "A small"], [running.engine.tokenizer("A large")["input_ids"], ids]):
        answer = client.completions.create(prompt=prompt, n=2, **keys)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices[2:]] == [text, text] != [answer.choices[0].text] * 2
        assert answer.usage.completion_tokens == 24 and {choice.finish_reason for choice in answer.choices} == {
            "length"
        }
    streamed_texts = ["", ""]
    for chunk in client.completions.create(prompt=["A large", "A small"], stream=True, **keys):
        streamed_texts[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed_texts == [answer.choices[0].text, text]


def test_a_completion_has_16_tokens_by_default_and_logprobs_with_offsets(client):
    [choice] = client.completions.create(
        model="bundled", prompt="A small", temperature=0, logprobs=3, extra_body={"ignore_eos": True}
    ).choices
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 16
    assert all(
        len(top) == 3 and token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
    )
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("<|") or choice.text[offset:].startswith(token)


def test_top_logprobs_of_completions_include_the_sampled_token(client):
    [choice] = client.completions.create(
        model="bundled", prompt="A small", temperature=2, seed=1, logprobs=1, extra_body={"ignore_eos": True}
    ).choices
    shown = choice.logprobs.top_logprobs
    assert {len(top) for top in shown} == {1, 2}  # the sampled token is the most likely one, or is added
    for token, logprob, top in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, shown, strict=True):
        assert logprob <= top[token] == max(top.values()) or top[token] == logprob


def test_the_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["bundled"]


@pytest.mark.spawns
def test_errors_have_the_class_param_and_code_that_clients_expect(client):
    with pytest.raises(openai.NotFoundError) as missing:
        create(client, "Hello", model="gpt-4")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        create(client, image_part(data_uri()), image_part("data:image/png;base64,AAAA"), "Hello")
    assert bad.value.param == "messages[0].content[1].image_url.url" and "not an image" in bad.value.message
    with pytest.raises(openai.BadRequestError, match="temperature: Input should be less than or equal to 2"):
        create(client, "Hello", temperature=3)
    with pytest.raises(openai.BadRequestError, match=r"prompt has .* tokens") as long:
        create(client, "Hello " * 2000)
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")
