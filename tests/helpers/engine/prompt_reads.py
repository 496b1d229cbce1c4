"""Requests that read their prompts, in one batch with others that generate, and what transformers says of them."""

from dataclasses import dataclass

import numpy as np
import torch

from mmvllm import LLM, RequestOutput, SamplingParams
from mmvllm.pooling_params import PoolingParams
from tests.helpers.engine.engines import assert_idle
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.models.reference import Reference

TOKENS, TOP = 6, 3
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
READING = SamplingParams(max_tokens=TOKENS, ignore_eos=True, prompt_logprobs=TOP, n=2)
ONLY_READING = SamplingParams(max_tokens=0, prompt_logprobs=0)
REQUESTS = {
    "text": ask("Count the shapes, and say which of them is the largest."),
    "two": ask("First: ", noise_image(60, 133, 2), " then: ", noise_image(91, 64, 1), " what changed?"),
}
POOLINGS = (
    PoolingParams(),
    PoolingParams(pooling="mean"),
    PoolingParams(pooling="mean", normalize=False, dimensions=5),
)


@dataclass
class Expected:
    """What transformers gives for one request: log-probabilities (T - 1, V), hidden states (T, C), greedy tokens."""

    token_ids: list[int]
    logprobs: torch.Tensor
    hidden: torch.Tensor
    completion: list[int]

    @classmethod
    def of(cls, reference: Reference, request: dict) -> "Expected":
        inputs = reference.inputs(request)
        found = reference.logprobs(inputs), reference.hidden_states(inputs), reference.generate(request, TOKENS)
        return cls(inputs["input_ids"][0].tolist(), *found)

    def vector(self, params: PoolingParams) -> np.ndarray:
        vector = (self.hidden[-1] if params.pooling == "last" else self.hidden.mean(dim=0))[: params.dimensions]
        return (vector / vector.norm() if params.normalize else vector).numpy()


def add_all(llm: LLM, name: str) -> list:
    """A request of each kind with one prompt, all in the engine: its groups."""
    prompt = llm.processor(REQUESTS[name])
    groups = [llm.engine.add(prompt, params) for params in (GREEDY, READING, ONLY_READING)]
    return groups + [llm.engine.add(prompt, pooling=params) for params in POOLINGS]


def finish(llm: LLM, preempted_at: int | None = None) -> int:
    """Run the engine; preempt all that runs after this step. Returns the number of steps."""
    steps = 0
    while not llm.engine.is_finished():
        llm.engine.step()
        if steps == preempted_at:
            llm.engine.scheduler.preempt_all()
        llm.engine.scheduler.check()
        steps += 1
    assert_idle(llm)
    return steps


def check_all(groups: list, expected: Expected) -> None:
    greedy, reading, only_reading, *pooled = (group.output for group in groups)
    assert greedy.token_ids == expected.completion and greedy.prompt_logprobs is None
    assert [completion.token_ids for completion in reading.completions] == [expected.completion] * 2
    check_logprobs(reading, expected, TOP)
    check_logprobs(only_reading, expected, 0)
    assert (only_reading.text, only_reading.token_ids, only_reading.finish_reason) == ("", [], "length")
    for params, output in zip(POOLINGS, pooled, strict=True):
        assert output.embedding.dtype == np.float32 and output.token_ids == []
        np.testing.assert_allclose(output.embedding, expected.vector(params), atol=2e-5)


def check_logprobs(output: RequestOutput, expected: Expected, number: int) -> None:
    first, *found = output.prompt_logprobs
    assert first is None and len(found) == len(expected.logprobs)
    for entry, target, row in zip(found, expected.token_ids[1:], expected.logprobs, strict=True):
        own = next(iter(entry))
        assert own == target and entry[own].rank == 1 + (row > row[target]).sum()
        assert {*entry} == {target, *row.topk(number).indices.tolist()}
        assert all(abs(logprob - row[token_id]) < 1e-4 for token_id, logprob in entry.items())
