"""Aborts, preemptions, interrupts and failures while a step that was launched ahead is in flight."""

import pytest

from mmvllm import SamplingParams
from mmvllm.sampling.sampler import AsyncSamplerOutput
from tests.helpers.engine.ahead import GREEDY, PROMPTS, TOKENS, add, completions, finish, run, step
from tests.helpers.engine.engines import assert_idle
from tests.helpers.models.shapes import every_family

pytestmark = pytest.mark.thinned


@pytest.mark.thinned(1)
@every_family
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_abort_after_each_step(n, caching, make_pair):
    plain, ahead = make_pair(enable_prefix_caching=caching)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, n=n)
    (want,), (kept_want,) = run(plain, [(1, params)]), run(plain, [(2, GREEDY)])
    for steps in range(TOKENS):
        aborted, kept = add(ahead, 1, params), add(ahead, 2, GREEDY)
        outputs = {}
        for _ in range(steps):
            outputs |= step(ahead)
        output = ahead.engine.abort_request(aborted)
        ahead.engine.scheduler.check()
        # The id may be reused at once, though a step with the old request may be in flight.
        prompt = ahead.processor(PROMPTS[0])
        ahead.engine.add_request(prompt, SamplingParams(max_tokens=1), request_id=aborted)
        outputs = finish(ahead)
        assert [c.token_ids for c in output.completions] == [
            answer[0][: len(c.token_ids)] for answer, c in zip(want, output.completions, strict=True)
        ]
        assert len(output.completions[0].token_ids) == steps and output.finish_reason == "aborted"
        assert completions(outputs[kept]) == kept_want and len(outputs[aborted].token_ids) == 1


def test_aborting_all_requests_discards_the_step_in_flight(ahead):
    request_id = add(ahead, 1, GREEDY)
    for _ in range(3):
        step(ahead)
    assert ahead.engine._ahead is not None
    ahead.engine.abort_request(request_id)
    assert ahead.engine._ahead is None and ahead.engine.is_finished()
    assert_idle(ahead)


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_after_each_step(caching, make_pair):
    plain, ahead = make_pair(enable_prefix_caching=caching)
    requests = [(1, GREEDY), (2, SamplingParams(temperature=1.0, seed=5, max_tokens=TOKENS, ignore_eos=True))]
    want = run(plain, requests)
    for steps in range(1, TOKENS):
        for victims in (1, 2):
            ids = [add(ahead, *request) for request in requests]
            for _ in range(steps):
                step(ahead)
            for _ in range(victims):
                ahead.engine.scheduler.preempt(ahead.engine.scheduler.running[0])
            ahead.engine.scheduler.check()
            outputs = finish(ahead)
            assert [completions(outputs[request_id]) for request_id in ids] == want


@pytest.mark.thinned(1)
@every_family
@pytest.mark.parametrize("where", ["run", "schedule", "tokens", "postprocess"])
def test_an_interrupt_in_each_step(where, make_pair, monkeypatch):
    plain, ahead = make_pair(enable_prefix_caching=False)
    requests = [(0, SamplingParams(max_tokens=TOKENS, ignore_eos=True, n=2)), (2, GREEDY)]
    want = run(plain, requests)
    engine = ahead.engine
    owner = {"run": engine.model_runner, "tokens": AsyncSamplerOutput}.get(where, engine.scheduler)
    for at in range(TOKENS - 1):  # the last step launches nothing more
        ids = [add(ahead, *request) for request in requests]
        for _ in range(at):
            step(ahead)
        with monkeypatch.context() as patch:
            patch.setattr(owner, where, lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                for _ in range(2):  # a step that was launched ahead may launch nothing more
                    engine.step()
        engine.scheduler.check()
        assert engine._ahead is None
        outputs = finish(ahead)
        assert [completions(outputs[request_id]) for request_id in ids] == want


@pytest.mark.thinned(3)
@pytest.mark.parametrize("where", ["run", "tokens"])
@pytest.mark.parametrize("at", range(TOKENS + 1))
def test_a_failure_in_each_step(where, at, make_pair, monkeypatch):
    """Its requests end with an error and the tokens generated before; later requests are not affected."""
    plain, ahead = make_pair()
    fifth = run(plain, [(0, GREEDY)])[0][0][0][4]
    requests = [(1, GREEDY), (2, GREEDY), (0, SamplingParams(max_tokens=TOKENS, stop_token_ids=[fifth]))]
    want, late_want = run(plain, requests), run(plain, [(0, GREEDY)])
    owner = ahead.engine.model_runner if where == "run" else AsyncSamplerOutput
    original, calls = getattr(owner, where), []

    def failing(*args):
        calls.append(None)
        if len(calls) == at + 1:
            raise RuntimeError("an illegal memory access was encountered")
        return original(*args)

    monkeypatch.setattr(owner, where, failing)
    ids = [add(ahead, *request) for request in requests]
    outputs = finish(ahead)
    for request_id, answer in zip(ids, want, strict=True):
        output = outputs[request_id]
        if at < len(answer[0][0]):
            assert "illegal memory access" in output.error and output.token_ids == answer[0][0][:at]
        else:
            assert completions(output) == answer
    monkeypatch.undo()
    assert run(ahead, [(0, GREEDY)]) == late_want


@pytest.mark.thinned(4)
@pytest.mark.parametrize("at", range(TOKENS))
def test_a_row_without_a_valid_token(at, make_pair, monkeypatch):
    """The step launched ahead uses an arbitrary token id, and its result is discarded."""
    plain, ahead = make_pair()
    want = run(plain, [(1, GREEDY), (2, GREEDY)])
    launch, calls = ahead.engine.model_runner.run, []

    def broken(*args):
        logits = launch(*args).clone()
        calls.append(None)
        if len(calls) == at + 1:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(ahead.engine.model_runner, "run", broken)
    bad, good = add(ahead, 1, GREEDY), add(ahead, 2, GREEDY)
    outputs = finish(ahead)
    assert "not numbers" in outputs[bad].error and outputs[bad].token_ids == want[0][0][0][:at]
    assert completions(outputs[good]) == want[1]
