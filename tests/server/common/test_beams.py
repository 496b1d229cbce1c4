"""Beam search and best_of in the server: the choices are the completions of `LLM`."""

import pytest

from mmvllm import LLM, SamplingParams
from tests.helpers.engine.requests import ask
from tests.helpers.serving.server import ENGINE, call, chat, completion, error_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = "Count the shapes."


@pytest.fixture(scope="module")
def texts():
    """Texts of `LLM`, by its parameters."""
    with LLM(**ENGINE) as llm:

        def texts(**params) -> list[str]:
            output = llm.generate_multimodal([ask(QUESTION)], SamplingParams(max_tokens=8, **params))[0]
            return [one.text for one in output.completions]

        yield texts


def answers(app, **fields) -> list[str]:
    answer = call(app, "POST", CHAT, json=chat(QUESTION, max_tokens=8, **fields))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert [choice["index"] for choice in body["choices"]] == [*range(len(body["choices"]))]
    return [choice["message"]["content"] for choice in body["choices"]]


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
    together = call(app, "POST", COMPLETIONS, json=completion(prompt=prompts, **fields)).json()["choices"]
    alone = [call(app, "POST", COMPLETIONS, json=completion(prompt=one, **fields)).json()["choices"] for one in prompts]
    assert [choice["text"] for choice in together] == [choice["text"] for own in alone for choice in own]


def test_an_echo_precedes_each_hypothesis(app):
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 6}
    plain, echoed = (
        call(app, "POST", COMPLETIONS, json=completion(prompt="One star.", **fields, echo=echo)).json()["choices"]
        for echo in (False, True)
    )
    assert [choice["text"] for choice in echoed] == ["One star." + choice["text"] for choice in plain]


def test_an_echo_with_best_of(app):
    """The log-probabilities of the prompt come with whichever completion is the most likely one."""
    fields = {"temperature": 1.0, "best_of": 3, "max_tokens": 4, "logprobs": 1, "ignore_eos": True}
    want = call(app, "POST", COMPLETIONS, json=completion(prompt="One star.", echo=True, max_tokens=0, logprobs=1))
    want = want.json()["choices"][0]["logprobs"]["token_logprobs"]
    for seed in range(4):
        body = completion(prompt="One star.", echo=True, seed=seed, **fields)
        choice = call(app, "POST", COMPLETIONS, json=body).json()["choices"][0]
        shown = choice["logprobs"]["token_logprobs"]
        assert choice["text"].startswith("One star.") and len(shown) == len(want) + 4
        assert shown[1 : len(want)] == pytest.approx(want[1:], abs=1e-4) and shown[0] is None


def test_hypotheses_have_log_probabilities(app):
    body = chat("One star.", use_beam_search=True, n=2, max_tokens=4, logprobs=True, top_logprobs=2)
    answer = call(app, "POST", CHAT, json=body)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        entries = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries).startswith(choice["message"]["content"])
        assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] < 0 for entry in entries)


def test_an_echoed_prompt_has_no_log_probabilities_beside_beams(app):
    body = completion(prompt="One star.", use_beam_search=True, echo=True, logprobs=1, max_tokens=2)
    error = error_of(call(app, "POST", COMPLETIONS, json=body))
    assert error["param"] == "echo" and "cannot be used with beam search" in error["message"]
