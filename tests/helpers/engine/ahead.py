"""Requests for engines that launch a step before the tokens of the previous one are known, and their completions."""

from mmvllm import SamplingParams
from mmvllm.sampling.sampler import AsyncSamplerOutput
from tests.helpers.engine.engines import assert_idle
from tests.helpers.engine.requests import ask, frames, noise_image

TOKENS = 10
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
IMAGES = [noise_image(91, 64, 1), noise_image(60, 133, 2)]
PROMPTS = [
    ask("Count the shapes."),
    ask(IMAGES[0], "Describe this image."),
    ask("First: ", IMAGES[1], " then: ", IMAGES[0], " what changed?"),
    ask(frames(4, 56, 56), "?"),
]
# Requests as (index of the prompt, sampling parameters), for the first step; two more are added later.
MIXED = [
    (0, GREEDY),
    (1, SamplingParams(max_tokens=3, ignore_eos=True)),
    (2, SamplingParams(temperature=1.0, seed=1, max_tokens=TOKENS)),
    (1, SamplingParams(temperature=1.2, seed=2, n=3, top_k=40, max_tokens=7, ignore_eos=True)),
    (0, SamplingParams(temperature=1.5, seed=3, top_p=0.9, min_tokens=4, max_tokens=TOKENS)),
    (2, SamplingParams(temperature=1.5, seed=4, stop=["e", "a", "1"], max_tokens=30, ignore_eos=True)),
    (0, SamplingParams(max_tokens=1)),
    (3, SamplingParams(max_tokens=6, ignore_eos=True)),
]
LATER = [
    (0, SamplingParams(max_tokens=5, repetition_penalty=1.5, presence_penalty=0.5, ignore_eos=True)),
    (1, SamplingParams(max_tokens=6, logprobs=3, ignore_eos=True)),
]


def add(llm, which: int, params: SamplingParams) -> str:
    prompt = llm.processor(PROMPTS[which])
    return llm.engine.add_request(prompt, params)


def step(llm) -> dict:
    """Outputs of one step by request id; the invariants of the scheduler hold afterwards."""
    outputs, num_tokens = llm.engine.step()
    assert num_tokens > 0
    llm.engine.scheduler.check()
    assert llm.engine._ahead is None or not llm.engine.is_finished()
    return {output.request_id: output for output in outputs}


def finish(llm) -> dict:
    outputs = {}
    while not llm.engine.is_finished():
        outputs |= step(llm)
    assert_idle(llm)
    assert llm.engine._ahead is None
    return outputs


def completions(output) -> list[tuple]:
    """Tokens, text and finish reason of each completion, and the ids of the logprobs at each token."""
    return [(c.token_ids, c.text, c.finish_reason, [set(row) for row in c.logprobs or ()]) for c in output.completions]


def run(llm, requests, later=()) -> list[list[tuple]]:
    """Completions of requests, of which `later` are added one per step."""
    ids, outputs = [add(llm, *request) for request in requests], {}
    for request in later:
        outputs |= step(llm)
        ids.append(add(llm, *request))
    outputs |= finish(llm)
    return [completions(outputs[request_id]) for request_id in ids]


def record_events(llm, monkeypatch) -> list[str]:
    """From now on: "launch" for every batch that runs, "wait" for every one whose tokens are read."""
    seen, launch, wait = [], llm.engine.model_runner.run, AsyncSamplerOutput.tokens
    monkeypatch.setattr(llm.engine.model_runner, "run", lambda *args: seen.append("launch") or launch(*args))
    monkeypatch.setattr(AsyncSamplerOutput, "tokens", lambda sampled: seen.append("wait") or wait(sampled))
    return seen
