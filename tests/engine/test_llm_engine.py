"""LLMEngine: step, abort, failures of a step, start-up and exit."""

import gc
import weakref

import pytest
import torch

from mmvllm import LLM, LLMEngine, SamplingParams
from tests.helpers.engine.requests import ask

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def test_lower_priority_values_are_scheduled_first(llm):
    requests = [ask("Count.", request_id=str(i), priority=-i) for i in range(12)]
    engine, order = llm.engine, []
    for request in requests:
        prompt = llm.processor(request)
        engine.add_request(prompt, SHORT, request["request_id"], priority=request["priority"])
    while not engine.is_finished():
        order += [int(output.request_id) for output in engine.step()[0]]
    assert order[:4] == [11, 10, 9, 8]


def test_nan_logits_fail_only_their_request(llm):
    ids = [llm.engine.model_config.image_token_id] * 4 + [5]
    broken = {"pixel_values": torch.full((16, 1176), float("nan")), "image_grid_thw": [(1, 4, 4)]}
    for params in (SHORT, SamplingParams(temperature=1.0, n=3)):
        bad = llm.engine.add_request(ids, params, **broken)
        good = llm.engine.add_request("Count.", SHORT)
        outputs = {}
        while not llm.engine.is_finished():
            outputs |= {output.request_id: output for output in llm.engine.step()[0]}
        assert "not numbers" in outputs[bad].error and outputs[bad].finish_reason == "error"
        assert outputs[good].error is None and len(outputs[good].token_ids) == 4


@pytest.mark.thinned(3)
@pytest.mark.parametrize("where", ["run", "postprocess"])
@pytest.mark.parametrize("at", range(6))
def test_an_interrupted_step_does_not_affect_other_requests(where, at, checkpoint, make_llm, monkeypatch):
    """Copies on write that were scheduled but not executed would leave completions of n > 1 with stale KV."""
    llm = make_llm(checkpoint, kvcache_block_size=4, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=8, ignore_eos=True, n=3)
    want = llm.generate("Count the shapes.", SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids
    other = llm.engine.add_request("Count the shapes.", params)
    for _ in range(at):
        llm.engine.step()
    owner = llm.engine.model_runner if where == "run" else llm.engine.scheduler
    monkeypatch.setattr(owner, where, lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate("x", SHORT)
    monkeypatch.undo()
    outputs = []
    while not llm.engine.is_finished():
        outputs += llm.engine.step()[0]
        llm.engine.scheduler.check()
    assert outputs[0].request_id == other
    assert [completion.token_ids for completion in outputs[0].completions] == [want] * 3


def test_a_request_that_finished_in_an_interrupted_commit_is_not_lost(llm, monkeypatch):
    scheduler, params = llm.engine.scheduler, SamplingParams(max_tokens=1, ignore_eos=True)
    first, second = (llm.engine.add_request("Count the shapes.", params) for _ in range(2))
    real = scheduler._finish_reason

    def interrupted(seq):
        if seq.request_id == second:
            raise KeyboardInterrupt
        return real(seq)

    monkeypatch.setattr(scheduler, "_finish_reason", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    llm.engine.abort_request(second)
    assert [output.request_id for output in llm.engine.step()[0]] == [first]
    assert llm.engine.is_finished()


def test_request_ids_in_flight_are_unique(llm):
    llm.engine.add_request("x", SHORT, "a")
    with pytest.raises(ValueError, match="request_id 'a' is already in flight"):
        llm.engine.add_request("y", SHORT, "a")
    assert llm.engine.abort_request("a").num_prompt_tokens == 1
    llm.engine.abort_request(llm.engine.add_request("y", SHORT, "a"))


def test_abort_returns_the_tokens_generated_so_far(llm):
    engine = llm.engine
    request_id = engine.add_request("Count the shapes.", SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(3):
        engine.step()
    output = engine.abort_request(request_id)
    assert output.finish_reason == "aborted" and len(output.token_ids) == 3
    assert engine.abort_request(request_id) is None and engine.abort_request("nonsense") is None


def test_warm_up_and_exit(checkpoint):
    engine = LLMEngine(checkpoint)
    assert engine.warmup_model() > 0
    assert engine.is_finished()
    engine.exit()
    engine.exit()
    with pytest.raises(RuntimeError, match="has exited"):
        engine.add_request("x")


@pytest.mark.slow
def test_an_engine_is_freed_when_its_last_reference_is_deleted(checkpoint):
    llm = LLM(checkpoint, skip_warmup=True, num_kvcache_blocks=64)
    ref = weakref.ref(llm.engine)
    del llm
    gc.collect()
    assert ref() is None
