"""Grammars of untrusted senders: what would end or occupy the process of the engine ends one made for it instead."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.errors import RequestError, RequestFailed
from mmvllm.processes.pool import WorkersUnusable
from mmvllm.sampling import grammar_trial
from mmvllm.sampling.grammar import GrammarCompiler
from mmvllm.sampling.grammar_matcher import TakesLonger
from mmvllm.sampling.grammar_trial import GrammarTrial
from mmvllm.structured.params import StructuredOutputsParams
from tests.helpers.engine.async_engines import OPTIONS, async_test, collect
from tests.helpers.engine.requests import ask
from tests.helpers.media import tasks
from tests.helpers.media.hostile import ambiguous_schema
from tests.helpers.models.tokenizers import tokenizer_of
from tests.helpers.processes import spawned, wait_until_gone

pytest.importorskip("llguidance")
pytestmark = pytest.mark.spawns


def rules(number: int) -> str:
    """A grammar whose rules lead to each other."""
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(number)), f'r{number}: "a"'])


# Each with the limit that it exceeds, where nothing is refused before.
HOSTILE = {
    "rules": ("grammar", rules(20_000)),
    "a number": ("json", json.dumps({"const": -(2**63)})),
    "multiples": ("json", json.dumps({"type": "integer", "multipleOf": 1_234_567})),
    "repetitions": ("regex", "(a|b)?" * 9000),
    "classes": ("regex", "(?i)" + r"\p{L}?" * 5000),
    "pairs": (
        "json",
        json.dumps({"type": "object", "patternProperties": {f"^a{i:05}[a-z]*$": {} for i in range(2000)}}),
    ),
    "conjunctions": ("json", json.dumps({"type": "string", "allOf": [{"pattern": f"a{i}"} for i in range(22)]})),
}


def unchecked(kind: str, text: str) -> StructuredOutputsParams:
    """Parameters that nothing has looked at, as those whose cost is not noticed."""
    params = StructuredOutputsParams(**{kind: '{"type":"null"}' if kind == "json" else 'start: "a"'})
    object.__setattr__(params, kind, text)
    return params


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("bundled")


@pytest.fixture(scope="module")
def trial(tokenizer) -> Iterator[GrammarTrial]:
    trial = GrammarTrial(tokenizer.backend_tokenizer.to_str(), len(tokenizer), [tokenizer.eos_token_id])
    yield trial
    trial.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_what_takes_too_much_is_refused(name, trial):
    kind, text = HOSTILE[name]
    with pytest.raises(
        RequestError, match=rf"^structured\.{kind} cannot be enforced: compiling it takes more"
    ) as caught:
        trial.check(unchecked(kind, text))
    assert caught.value.param == f"structured.{kind}"
    trial.check(StructuredOutputsParams(regex="another"))


def test_what_takes_too_long_to_follow_is_refused(trial):
    with pytest.raises(RequestError, match=r"finding its first tokens takes more than 0\.05 s"):
        trial.check(StructuredOutputsParams(json=ambiguous_schema(250), whitespace_pattern=""))


def test_what_takes_longer_is_told_apart(trial):
    """Others wait for the quick tries only."""
    slow = unchecked(*HOSTILE["pairs"])
    with pytest.raises(TakesLonger):
        trial.check(slow, is_quick=True)
    trial.check(StructuredOutputsParams(regex="quick"), is_quick=True)
    with pytest.raises(RequestError, match="compiling it takes more than 2 s"):
        trial.check(unchecked(*HOSTILE["a number"]), is_quick=True)  # which does not take time


def test_a_refused_grammar_is_not_tried_again(tokenizer, monkeypatch):
    tried, check = [], GrammarTrial.check
    monkeypatch.setattr(GrammarTrial, "check", lambda self, *given: (tried.append(given), check(self, *given))[1])
    compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id], len(tokenizer))
    compiler.distrust()
    for _ in range(3):
        for params in (unchecked(*HOSTILE["rules"]), unchecked("regex", "(")):
            with pytest.raises(RequestError, match="cannot be enforced: ") as caught:
                compiler.check(params)
            assert caught.value.param == f"structured.{params.kind}"
        compiler.check(StructuredOutputsParams(regex="a"))
    compiler.close()
    assert len(tried) == 3


def test_a_process_that_fails_refuses_nothing_for_good(tokenizer, monkeypatch):
    """It may have been killed for another reason than the grammar."""
    compiler, params = GrammarCompiler(tokenizer, [tokenizer.eos_token_id], len(tokenizer)), {"regex": "good"}
    compiler.distrust()
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "_try", tasks.crash_on)
        with pytest.raises(TakesLonger):
            compiler.check(StructuredOutputsParams(**params), is_quick=True)
        with pytest.raises(RequestFailed, match=r"could not be compiled .*; try again later"):
            compiler.check(StructuredOutputsParams(**params))
    compiler.check(StructuredOutputsParams(**params))
    compiler.close()


def test_a_closed_compiler_starts_no_process(tokenizer):
    compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id], len(tokenizer))
    compiler.distrust()
    compiler.close()
    with pytest.raises(WorkersUnusable):
        compiler.check(StructuredOutputsParams(regex="a"))


def test_a_try_leaves_no_process(trial):
    (worker,) = [process for process in spawned() if process.pid == trial._pool.run(tasks.pid)]
    for kind, text in HOSTILE.values():
        with pytest.raises(RequestError):
            trial.check(unchecked(kind, text))
    assert worker.is_running() and not worker.children()


@pytest.mark.parametrize(
    "fields", [{"regex": "("}, {"grammar": "start: nothing"}, {"json": {"type": "string", "pattern": "("}}]
)
def test_other_errors_are_those_of_the_compiler(fields, trial, tokenizer):
    params = StructuredOutputsParams(**fields)
    with pytest.raises(RequestError) as expected:
        GrammarCompiler(tokenizer, [tokenizer.eos_token_id], len(tokenizer)).check(params)
    with pytest.raises(RequestError) as caught:
        trial.check(params)
    assert (str(caught.value), caught.value.param) == (str(expected.value), expected.value.param)


def test_the_largest_that_are_not_refused_before_are_compiled(trial):
    trial.check(StructuredOutputsParams(grammar=rules(990)))
    trial.check(StructuredOutputsParams(json={"type": "integer", "multipleOf": 9973}))
    trial.check(StructuredOutputsParams(choice=[f"{i:05}" for i in range(8000)]))
    trial.check(StructuredOutputsParams(regex="[ab]?" * 400))


def test_the_process_does_not_load_torch(trial):
    assert "torch" not in trial._pool.run(tasks.loaded_modules)


@async_test
async def test_an_engine_that_does_not_trust_grammars_tries_them_first(checkpoint):
    before = {process.pid for process in spawned()}
    engine = AsyncLLM(checkpoint, **OPTIONS, trusts_grammars=False)
    try:
        for text, params in (("abba", {"regex": "ab{2}a"}), ("yes", {"choice": ["yes"]})):
            assert (await collect(engine, ask("Hello"), SamplingParams(structured=params)))[1] == [text]
        processes = [process.pid for process in spawned() if process.pid not in before]
        assert len(processes) == 1
        params = SamplingParams(structured=unchecked("grammar", rules(20_000)))
        with pytest.raises(RequestError, match="compiling it takes more"):
            await collect(engine, ask("Hello"), params)
        assert (await collect(engine, ask("Hello"), SamplingParams(structured={"regex": "a{3}"})))[1] == ["aaa"]
    finally:
        await engine.shutdown()
    await asyncio.to_thread(wait_until_gone, [process.pid for process in spawned() if process.pid not in before])
    wait_until_gone(processes)
