"""Structured completions of whole engines: they validate, and do not depend on how they are computed."""

import asyncio
import json
import re

import jsonschema
import pytest

from mmvllm import LLM, AsyncLLM, RequestError, SamplingParams
from tests.helpers.engine.engines import assert_idle
from tests.helpers.engine.rank_threads import use_rank_threads
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.serving.schemas import SchemaMaker

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["round", "square"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}
ENGINE = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 128, "skip_warmup": True}
PARAMS = [
    SamplingParams(structured={"json": SCHEMA, "whitespace_pattern": " ?"}, max_tokens=60),
    SamplingParams(structured={"regex": "[a-z]{3}-[0-9]{2}"}, temperature=1.0, seed=4, max_tokens=30),
    SamplingParams(max_tokens=10, ignore_eos=True),
    SamplingParams(structured={"choice": ["one", "two", "three"]}, temperature=2.0, seed=1, n=3, max_tokens=20),
    SamplingParams(structured={"json_object": True}, max_tokens=9),
    SamplingParams(structured={"grammar": 'start: ("x" | "y")+ "!"'}, bad_words=["yx"], logprobs=2, max_tokens=12),
]
REQUESTS = [ask("Hello"), ask(noise_image(60, 60), "Which?"), ask("a"), ask("Number?"), ask("b"), ask("c")]
WAYS = [
    {"async_scheduling": True},
    {"max_num_seqs": 2, "kvcache_block_size": 4},
    {"max_num_batched_tokens": 5, "async_scheduling": True},
    pytest.param({"async_scheduling": True, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
]


def shown(outputs) -> list:
    return [[(one.text, one.token_ids, one.finish_reason) for one in output.completions] for output in outputs]


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Completions of each request alone."""
    llm = LLM(checkpoint, **ENGINE, async_scheduling=False, enable_prefix_caching=False)
    found = [llm.generate_multimodal([REQUESTS[i]], PARAMS[i])[0] for i in range(len(PARAMS))]
    llm.exit()
    return shown(found)


def test_completions_are_what_was_asked_for(expected):
    [[(text, _, reason)], [(code, *_)], _, words, [(cut, _, why)], [(grammar, *_)]] = expected
    jsonschema.validate(json.loads(text), SCHEMA)
    assert reason == "eos" and code[3] == "-" and len(code) == 6
    assert {word for word, *_ in words} <= {"one", "two", "three"}
    assert cut.startswith("{") and why == "length" and {*grammar} <= {*"xy!"} and "yx" not in grammar


@pytest.mark.parametrize("way", WAYS)
def test_completions_do_not_depend_on_the_batch_chunks_or_look_ahead(checkpoint, make_llm, monkeypatch, expected, way):
    use_rank_threads(monkeypatch)
    llm = make_llm(checkpoint, **way)
    assert shown(llm.generate_multimodal(REQUESTS, PARAMS)) == expected
    assert_idle(llm)


@pytest.mark.parametrize("ahead", [False, True])
def test_completions_do_not_depend_on_preemption(checkpoint, make_llm, expected, ahead):
    llm = make_llm(checkpoint, kvcache_block_size=4, async_scheduling=ahead)
    engine = llm.engine
    added = [engine.add(llm.processor(REQUESTS[i]), PARAMS[i]) for i in (0, 3)]
    for step in range(200):
        if engine.is_finished():
            break
        engine.step()
        if step % 7 == 3 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
    assert shown([group.output for group in added]) == [expected[0], expected[3]]
    assert sum(seq.num_preemptions for group in added for seq in group.seqs) > 1


@pytest.mark.slow
def test_two_engines_and_streams_give_the_same(checkpoint, expected):
    async def run() -> list:
        async with AsyncLLM(checkpoint, data_parallel_size=2, **ENGINE) as engine:
            with pytest.raises(RequestError, match="unclosed group"):
                await anext(engine.generate("x", {"structured": {"json": {"type": "string", "pattern": "("}}}))

            async def last(i: int):
                return [delta async for delta in engine.generate(REQUESTS[i], PARAMS[i])][-1].output

            return await asyncio.gather(*map(last, (0, 3, 5)))

    assert shown(asyncio.run(run())) == [expected[0], expected[3], expected[5]]


def test_a_schema_that_cannot_be_enforced_does_not_stop_the_others(llm):
    wrong = SamplingParams(structured={"json": {"type": "string", "pattern": "("}})
    outputs = llm.generate_multimodal(REQUESTS[:2], [wrong, PARAMS[1]], on_error="return")
    assert outputs[0].exception.param == "structured.json"
    assert outputs[1].error is None and outputs[1].text[3] == "-"


@pytest.mark.parametrize(
    ("pattern", "allowed"), [(None, r"[ \n]?"), ("", ""), (" ?", " ?"), (r"[ \n]{0,9}", r"[ \n]{0,9}")], ids=repr
)
def test_json_is_compact_unless_another_white_space_is_asked_for(llm, pattern, allowed):
    """A hot random model writes every white space that may stand between tokens."""
    structured = {"json": SCHEMA, "whitespace_pattern": pattern}
    params = [SamplingParams(structured=structured, temperature=9.0, seed=i, max_tokens=400) for i in range(8)]
    found = [re.findall(r"\s+", out.text) for out in llm.generate(["JSON:"] * 8, params, use_tqdm=False)]
    spaces = [one for each in found for one in each]
    assert all(re.fullmatch(allowed, one) for one in spaces)
    assert (max(map(len, spaces), default=0) > 1) == (pattern == r"[ \n]{0,9}")


@pytest.mark.slow
def test_random_schemas_on_a_random_model(llm):
    schemas = [SchemaMaker(seed).schema() for seed in range(30)]
    params = [
        SamplingParams(structured={"json": schema, "whitespace_pattern": ""}, temperature=0.7, seed=i, max_tokens=150)
        for i, schema in enumerate(schemas)
    ]
    outputs = llm.generate([f"Object {i}:" for i in range(30)], params)
    finished = [
        (json.loads(o.text), schema) for o, schema in zip(outputs, schemas, strict=True) if o.finish_reason == "eos"
    ]
    for made, schema in finished:
        jsonschema.Draft202012Validator(schema).validate(made)
    assert len(finished) > 15 and {o.finish_reason for o in outputs} <= {"eos", "length"}
