"""Beam search and best_of in the server: the choices are the completions of `LLM`."""

import pytest

from mmvllm import SamplingParams
from tests.helpers.engine.requests import ask
from tests.helpers.serving.server import CHAT, COMPLETIONS, answered, chat, completion

QUESTION = "Count the shapes."


@pytest.fixture(scope="module")
def texts(bundled_llm):
    """Texts of `LLM`, by its parameters."""

    def texts(**params) -> list[str]:
        output = bundled_llm.generate_multimodal([ask(QUESTION)], SamplingParams(max_tokens=8, **params))[0]
        return [one.text for one in output.completions]

    return texts


def answers(app, **fields) -> list[str]:
    choices = answered(app, CHAT, chat(QUESTION, max_tokens=8, **fields))["choices"]
    assert [choice["index"] for choice in choices] == [*range(len(choices))]
    return [choice["message"]["content"] for choice in choices]


def completions(app, prompt: str | list[str], **fields) -> list[dict]:
    return answered(app, COMPLETIONS, completion(prompt=prompt, **fields))["choices"]


def test_choices_are_the_best_hypotheses(app, texts):
    assert answers(app, use_beam_search=True, n=3) == texts(beam_width=3, n=3)
    assert answers(app, use_beam_search=True) == texts(beam_width=1)
    wide = texts(beam_width=4, n=2, length_penalty=0.5, early_stopping=True)
    options = {"n": 2, "length_penalty": 0.5, "early_stopping": True}
    assert answers(app, beam_width=4, **options) == answers(app, use_beam_search=True, best_of=4, **options) == wide
    assert answers(app, use_beam_search=False, length_penalty=1.0, temperature=0) == texts()


def test_best_of(app, texts):
    sampled = {"temperature": 1.0, "seed": 5, "best_of": 4}
    assert answers(app, **sampled) == texts(**sampled)
    assert answers(app, **sampled, n=2) == texts(**sampled, n=2)


def test_several_prompts_have_their_own_hypotheses(app):
    prompts = ["One star.", "Two circles."]
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 6}
    alone = [choice["text"] for one in prompts for choice in completions(app, one, **fields)]
    assert [choice["text"] for choice in completions(app, prompts, **fields)] == alone


def test_an_echo_precedes_each_hypothesis(app):
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 6}
    plain, echoed = (completions(app, "One star.", **fields, echo=echo) for echo in (False, True))
    assert [choice["text"] for choice in echoed] == ["One star." + choice["text"] for choice in plain]


def test_an_echo_with_best_of(app):
    """The log-probabilities of the prompt come with whichever completion is the most likely one."""
    fields = {"temperature": 1.0, "best_of": 3, "max_tokens": 4, "logprobs": 1, "ignore_eos": True}
    [want] = completions(app, "One star.", echo=True, max_tokens=0, logprobs=1)
    want = want["logprobs"]["token_logprobs"]
    for seed in range(4):
        [choice] = completions(app, "One star.", echo=True, seed=seed, **fields)
        shown = choice["logprobs"]["token_logprobs"]
        assert choice["text"].startswith("One star.") and len(shown) == len(want) + 4
        assert shown[1 : len(want)] == pytest.approx(want[1:], abs=1e-4) and shown[0] is None


def test_hypotheses_have_log_probabilities(app):
    body = chat("One star.", use_beam_search=True, n=2, max_tokens=4, logprobs=True, top_logprobs=2)
    for choice in answered(app, CHAT, body)["choices"]:
        entries = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries).startswith(choice["message"]["content"])
        assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] < 0 for entry in entries)
