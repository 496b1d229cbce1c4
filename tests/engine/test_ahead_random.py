"""Random runs with steps launched ahead: completions equal a lone request's."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmvllm import LLM, SamplingParams
from tests.helpers.engine.ahead import PROMPTS, add, completions, finish, run, step
from tests.helpers.models.shapes import one_family

request = st.tuples(
    st.integers(0, len(PROMPTS) - 1),
    st.integers(1, 9),  # max_tokens
    st.integers(1, 3),  # n
    st.sampled_from([{}, {"temperature": 1.0}, {"stop": ("e", "1")}, {"presence_penalty": 1.0}]),
)
action = st.one_of(
    st.tuples(st.just("add"), request),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("preempt"), st.integers(0, 20)),
)


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Completions of a request that runs alone and without launching ahead; each is computed once."""
    llm = LLM(checkpoint, dtype="float32", device="cpu", num_kvcache_blocks=64, skip_warmup=True)
    known = {}

    def completions_of(which: int, params: SamplingParams) -> list[tuple]:
        if (which, params) not in known:
            known[which, params] = run(llm, [(which, params)])[0]
        return known[which, params]

    yield completions_of
    llm.exit()


@pytest.mark.slow
@one_family
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    actions=st.lists(action, max_size=30),
    block_size=st.sampled_from([1, 4, 7]),
    spare_blocks=st.integers(0, 40),
    budget=st.sampled_from([1, 5, 17, 4096]),
    max_num_seqs=st.integers(1, 4),
    caching=st.booleans(),
)
def test_random_runs(actions, block_size, spare_blocks, budget, max_num_seqs, caching, checkpoint, alone):
    """Each completion equals that of the request alone, or is a prefix of it."""
    llm = LLM(
        checkpoint,
        dtype="float32",
        device="cpu",
        kvcache_block_size=block_size,
        num_kvcache_blocks=-(-80 // block_size) + spare_blocks,  # enough for the longest request alone
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caching,
        skip_warmup=True,
        async_scheduling=True,
    )
    asked, outputs = {}, {}
    for kind, value in actions:
        groups, running = sorted(llm.engine.scheduler.groups), llm.engine.scheduler.running
        if kind == "add":
            which, max_tokens, n, extra = value
            params = SamplingParams(max_tokens=max_tokens, n=n, seed=max_tokens, **extra)
            asked[add(llm, which, params)] = which, params
        elif kind == "step":
            for _ in range(value):
                if not llm.engine.is_finished():
                    outputs |= step(llm)
        elif kind == "abort" and groups:
            request_id = groups[value % len(groups)]
            outputs[request_id] = llm.engine.abort_request(request_id)
            llm.engine.scheduler.check()
        elif kind == "preempt" and running:
            llm.engine.scheduler.preempt(running[value % len(running)])
    outputs |= finish(llm)
    assert outputs.keys() == asked.keys()
    for request_id, (which, params) in asked.items():
        for got, want in zip(completions(outputs[request_id]), alone(which, params), strict=True):
            assert got == want or (got[2] == "aborted" and got[0] == want[0][: len(got[0])])
    llm.exit()
