"""Log-probabilities of prompts from the server, as lm-eval's model `local-completions` asks for them."""

import math
from operator import itemgetter

import pytest
import torch

from tests.helpers.serving.server import CHAT, COMPLETIONS, answered, chat, chunks_of, completion, data_uri, image_part
from tests.server.refusals import refusal

CONTEXTS = ["The scene shows", "One two three", "A"]
CONTINUATIONS = [" a red circle.", " four", " B"]


@pytest.fixture(scope="module")
def hf(reference):
    return reference(None)


def logprobs_of(hf, token_ids: list[int]) -> torch.Tensor:
    """(T - 1, V) by transformers."""
    ids = torch.tensor([token_ids])
    return hf.logprobs({"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)})


def payload(prompt, **keys) -> dict:
    """What `LocalCompletionsAPI._create_payload` of lm-eval makes for a log-likelihood."""
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    return {"model": "bundled", "prompt": prompt} | asked | keys


def parse_logprobs(out: dict, ctxlens: list[int]) -> list[tuple[float, bool]]:
    """Read the response as `LocalCompletionsAPI.parse_logprobs` of lm-eval does."""
    res = []
    for choice, ctxlen in zip(sorted(out["choices"], key=itemgetter("index")), ctxlens, strict=True):
        assert ctxlen > 0, "Context length must be greater than 0"
        logprobs = sum(choice["logprobs"]["token_logprobs"][ctxlen:-1])
        tokens_logprobs = choice["logprobs"]["token_logprobs"][ctxlen:-1]
        top_logprobs = choice["logprobs"]["top_logprobs"][ctxlen:-1]
        is_greedy = True
        for tok, top in zip(tokens_logprobs, top_logprobs, strict=True):
            if tok != max(top.values()):
                is_greedy = False
                break
        res.append((logprobs, is_greedy))
    return res


def encoded(hf) -> list[tuple[list[int], list[int]]]:
    """Contexts and continuations as token ids; the last continuation is the greedy one."""
    pairs = [
        (hf.tokenizer(context)["input_ids"], hf.tokenizer(continuation)["input_ids"])
        for context, continuation in zip(CONTEXTS, CONTINUATIONS, strict=True)
    ]
    context, greedy = list(pairs[0][0]), []
    for _ in range(3):
        greedy.append(int(logprobs_of(hf, [*context, *greedy, 0])[-1].argmax()))
    return [*pairs, (context, greedy)]


def want(hf, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    rows = logprobs_of(hf, context + continuation)[-len(continuation) :]
    own = rows.gather(1, torch.tensor(continuation)[:, None])
    return own.sum().item(), rows.argmax(dim=1).tolist() == continuation


@pytest.mark.parametrize("max_tokens", [1, 0])
def test_loglikelihoods_of_lm_eval_equal_transformers(max_tokens, app, hf):
    pairs = encoded(hf)
    out = answered(app, COMPLETIONS, payload([a + b for a, b in pairs], max_tokens=max_tokens))
    if not max_tokens:  # older versions read up to the last token, of the prompt then
        for choice in out["choices"]:
            for column in choice["logprobs"].values():
                column.append(None)
    found = parse_logprobs(out, [len(context) for context, _ in pairs])
    for (logprob, is_greedy), pair in zip(found, pairs, strict=True):
        expected, expected_greedy = want(hf, *pair)
        assert logprob == pytest.approx(expected, abs=1e-3) and is_greedy is expected_greedy
    assert found[-1][1] and not found[0][1]


def test_prompts_of_text_have_the_same_loglikelihoods(app, hf):
    """Requests that are not tokenized by the client."""
    texts = ["The scene shows a red circle.", "One two three four"]
    ids = [hf.tokenizer(text)["input_ids"] for text in texts]
    found = [parse_logprobs(answered(app, COMPLETIONS, payload(prompts)), [2, 2]) for prompts in (texts, ids)]
    assert found[0] == [(pytest.approx(logprob, abs=1e-4), is_greedy) for logprob, is_greedy in found[1]]


def test_an_echo_has_the_format_of_openai(app, hf):
    """Texts joined are the text; offsets say where each begins; the first token has no log-probability."""
    ids = [*hf.tokenizer("Größe 🦩 <|im_start|> x")["input_ids"]]
    body = payload(ids, max_tokens=3, logprobs=2, n=2, ignore_eos=True)
    for choice in answered(app, COMPLETIONS, body)["choices"]:
        shown, text = choice["logprobs"], choice["text"]
        assert text.startswith("Größe 🦩 <|im_start|> x")
        lengths = {len(column) for column in shown.values()}
        assert lengths == {len(ids) + 3}
        assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
        assert all(logprob <= 0 for logprob in shown["token_logprobs"][1:])
        assert {len(top) for top in shown["top_logprobs"][1:]} <= {1, 2, 3}  # tokens of one text are shown once
        assert [next(iter(top)) for top in shown["top_logprobs"][1:]] == shown["tokens"][1:]
        assert shown["text_offset"] == sorted(shown["text_offset"])
        for token, offset in zip(shown["tokens"][: len(ids)], shown["text_offset"], strict=False):
            assert token.startswith("bytes:") or text[offset:].startswith(token)


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("max_tokens", [4, 0])
def test_a_stream_begins_with_the_echo(logprobs, max_tokens, app):
    keys = {"logprobs": logprobs, "max_tokens": max_tokens, "n": 2, "ignore_eos": True, "echo": True}
    body = completion(prompt="Größe 🦩 x", temperature=0, **keys)
    chunks = [chunk["choices"][0] for chunk in chunks_of(app, COMPLETIONS, body)]
    for choice in answered(app, COMPLETIONS, body)["choices"]:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        if logprobs is not None:
            for name, column in choice["logprobs"].items():
                joined = [value for chunk in own for value in chunk["logprobs"][name]]
                assert joined == column if name in ("tokens", "text_offset") else len(joined) == len(column)


def test_an_echo_without_logprobs_is_the_text_alone(app):
    plain = answered(app, COMPLETIONS, completion(temperature=0, max_tokens=4))["choices"][0]
    echoed = answered(app, COMPLETIONS, completion(temperature=0, max_tokens=4, echo=True))
    only = answered(app, COMPLETIONS, completion(max_tokens=0, echo=True))
    assert echoed["choices"][0]["text"] == "Hello" + plain["text"] and echoed["choices"][0]["logprobs"] is None
    assert only["choices"][0]["text"] == "Hello" and only["choices"][0]["finish_reason"] == "length"
    assert only["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_have_the_format_of_vllm(app, hf):
    ids = hf.tokenizer("Hello world")["input_ids"]
    body = completion(prompt=ids, prompt_logprobs=2, max_tokens=0)
    first, *found = answered(app, COMPLETIONS, body)["choices"][0]["prompt_logprobs"]
    assert first is None
    for entry, target, row in zip(found, ids[1:], logprobs_of(hf, ids), strict=True):
        assert {*entry} == {str(target), *map(str, row.topk(2).indices.tolist())}
        for token_id, shown in entry.items():
            assert math.isclose(shown["logprob"], row[int(token_id)], abs_tol=1e-4)
            assert shown["rank"] == 1 + (row > row[int(token_id)]).sum()
            assert shown["decoded_token"] == hf.tokenizer.decode([int(token_id)])
    # More are computed for an echo than the field shows.
    body = payload(ids, logprobs=5, prompt_logprobs=0)
    choice = answered(app, COMPLETIONS, body)["choices"][0]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1] * len(found)


@pytest.mark.spawns
def test_a_chat_with_an_image_has_prompt_logprobs(app):
    body = chat(image_part(data_uri()), "What?", max_tokens=1, prompt_logprobs=1)
    answer = answered(app, CHAT, body)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None and all(answer["prompt_logprobs"][1:])


def test_min_tokens_need_tokens(app):
    assert refusal(app, COMPLETIONS, completion(max_tokens=0, echo=True, min_tokens=1))["param"] == "min_tokens"
