"""Steps launched before the tokens of the last one are known: the same answers and books as without.

A GPU does this; here the CPU is told to, which computes at once what it is given and keeps the same order.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmvllm import LLM, SamplingParams
from mmvllm.engine.decode_graphs import DecodeGraphs
from mmvllm.engine.sampler import Sampled
from tests.helpers.engines import assert_idle
from tests.helpers.requests import ask, noise_image

TOKENS = 10
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
PICTURES = [noise_image(91, 64, 1), noise_image(60, 133, 2)]
PROMPTS = [
    ask("Count the shapes."),
    ask(PICTURES[0], "Describe this image."),
    ask("First: ", PICTURES[1], " then: ", PICTURES[0], " what changed?"),
]
MIXED = [
    (0, GREEDY),
    (1, SamplingParams(max_tokens=3, ignore_eos=True)),
    (2, SamplingParams(temperature=1.0, seed=1, max_tokens=TOKENS)),
    (1, SamplingParams(temperature=1.2, seed=2, n=3, top_k=40, max_tokens=7, ignore_eos=True)),
    (0, SamplingParams(temperature=1.5, seed=3, top_p=0.9, min_tokens=4, max_tokens=TOKENS)),
    (2, SamplingParams(temperature=1.5, seed=4, stop=["e", "a", "1"], max_tokens=30, ignore_eos=True)),
    (0, SamplingParams(max_tokens=1)),
]
LATER = [
    (0, SamplingParams(max_tokens=5, repetition_penalty=1.5, presence_penalty=0.5, ignore_eos=True)),
    (1, SamplingParams(max_tokens=6, logprobs=3, ignore_eos=True)),
]


@pytest.fixture
def make_pair(checkpoint, make_llm):
    """Two LLMs with the same options: one as it is on a CPU, one that looks ahead."""

    def make(**options):
        plain, ahead = (make_llm(checkpoint, **{"kvcache_block_size": 4} | options) for _ in range(2))
        ahead.engine._launches_ahead = True
        return plain, ahead

    return make


@pytest.fixture
def ahead(make_pair):
    return make_pair()[1]


def add(llm, which: int, params: SamplingParams) -> str:
    prompt = llm.processor(PROMPTS[which])
    return llm.engine.add_request(prompt, params)


def step(llm) -> dict:
    """Outputs of one step by request, after which the books balance."""
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


def answers(output) -> list[tuple]:
    """Tokens, text and reason of each, and which tokens were likely at every place."""
    return [
        (c.token_ids, c.text, c.finish_reason, [set(likely) for likely in c.logprobs or ()]) for c in output.completions
    ]


def run(llm, requests, later=()) -> list[list[tuple]]:
    """Answers to requests, some of which come when others are under way."""
    ids, outputs = [add(llm, *request) for request in requests], {}
    for request in later:
        outputs |= step(llm)
        ids.append(add(llm, *request))
    outputs |= finish(llm)
    return [answers(outputs[request_id]) for request_id in ids]


def events(llm, monkeypatch) -> list[str]:
    """From now on: "launch" for every batch that runs, "wait" for every one whose tokens are asked for."""
    seen, launch, wait = [], llm.engine.model_runner.run, Sampled.tokens
    monkeypatch.setattr(llm.engine.model_runner, "run", lambda *args: seen.append("launch") or launch(*args))
    monkeypatch.setattr(Sampled, "tokens", lambda sampled: seen.append("wait") or wait(sampled))
    return seen


def test_one_step_ahead_and_none_beyond_the_length(ahead, monkeypatch):
    seen = events(ahead, monkeypatch)
    run(ahead, [(1, SamplingParams(max_tokens=4, ignore_eos=True))])
    assert seen == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.1}, {"presence_penalty": 1}, {"logprobs": 0}])
def test_what_needs_the_tokens_waits_for_them(params, ahead, monkeypatch):
    seen = events(ahead, monkeypatch)
    run(ahead, [(0, SamplingParams(max_tokens=4, ignore_eos=True, **params))])
    assert seen == ["launch", "wait"] * 4


def test_off_on_a_cpu(make_pair, monkeypatch):
    plain, _ = make_pair()
    seen = events(plain, monkeypatch)
    run(plain, [(0, SamplingParams(max_tokens=4, ignore_eos=True))])
    assert seen == ["launch", "wait"] * 4


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_who_waits_starts_as_soon_as_another_has_reached_its_length(max_num_seqs, make_pair, monkeypatch):
    launches = []
    for llm in make_pair(max_num_seqs=max_num_seqs):
        seen = events(llm, monkeypatch)
        run(llm, [(0, SamplingParams(max_tokens=length, ignore_eos=True)) for length in (2, 6, 4)])
        launches.append(seen.count("launch"))
    assert launches == [12 if max_num_seqs == 1 else 6] * 2


def test_short_blocks_are_left_to_who_may_preempt(make_pair):
    """Two prompts of 6 blocks, of which the last has a free slot, fit; their answers do not, and nobody waits."""
    plain, ahead = make_pair(num_kvcache_blocks=13, enable_prefix_caching=False)
    requests = [(0, GREEDY), (0, SamplingParams(temperature=1.0, seed=6, max_tokens=TOKENS, ignore_eos=True))]
    assert len(ahead.processor(PROMPTS[0]).token_ids) == 23
    assert run(ahead, requests) == run(plain, requests)
    assert ahead.engine.scheduler.num_preemptions == plain.engine.scheduler.num_preemptions > 0


def test_a_step_without_all_that_run_has_none_behind_it(ahead):
    """The budget went to the first; whether the next one's does too is for `schedule` to say."""
    engine = ahead.engine
    for _ in range(2):
        add(ahead, 0, GREEDY)
    engine._launches_ahead = False
    step(ahead)
    engine._launches_ahead, engine.scheduler.max_num_batched_tokens = True, 1
    step(ahead)
    assert len(engine.scheduler.running) == 2 and engine._ahead is None
    finish(ahead)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kvcache_block_size": 1},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"num_kvcache_blocks": 26},
        {"num_kvcache_blocks": 34, "enable_prefix_caching": False},
        {"num_kvcache_blocks": 30, "max_num_batched_tokens": 9},
        {"encoder_cache_bytes": 12 * 64 * 4, "enable_prefix_caching": False},
        {"max_model_len": 60},
    ],
    ids=str,
)
def test_answers_are_the_same(options, make_pair):
    plain, ahead = make_pair(**options)
    for _ in range(2):  # cold, then from the caches
        want = run(plain, MIXED, LATER)
        assert run(ahead, MIXED, LATER) == want
    for llm in (plain, ahead):
        assert llm.engine.scheduler.num_preemptions > 0 or "num_kvcache_blocks" not in options


def test_what_is_cached_is_the_same(make_pair):
    """Blocks of answers too, with their own tokens in them."""
    plain, ahead = make_pair(kvcache_block_size=2)
    contents = []
    for llm in (plain, ahead):
        run(llm, MIXED[:4])
        contents.append(sorted(key[1] for key in llm.engine.scheduler.block_manager.cached))
    assert contents[0] == contents[1]


def test_an_end_that_nobody_foresaw(make_pair):
    """Each place of the answer as its end; the neighbour, whose steps run on, is not disturbed."""
    plain, ahead = make_pair()
    alone = run(plain, [(1, GREEDY)])[0][0][0]
    for end in range(TOKENS):
        stopping = SamplingParams(max_tokens=TOKENS, ignore_eos=True, stop_token_ids=[alone[end]])
        requests = [(1, stopping), (2, GREEDY), (1, stopping)]
        want = run(plain, requests)
        assert want[0][0][:1] == (alone[: alone.index(alone[end]) + 1],)
        assert run(ahead, requests) == want


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
        # The name is free at once, though a step with the old request in it may be under way.
        prompt = ahead.processor(PROMPTS[0])
        ahead.engine.add_request(prompt, SamplingParams(max_tokens=1), request_id=aborted)
        outputs = finish(ahead)
        assert [c.token_ids for c in output.completions] == [
            answer[0][: len(c.token_ids)] for answer, c in zip(want, output.completions, strict=True)
        ]
        assert len(output.completions[0].token_ids) == steps and output.finish_reason == "aborted"
        assert answers(outputs[kept]) == kept_want and len(outputs[aborted].token_ids) == 1


def test_an_abort_of_all_leaves_nothing_in_flight(ahead):
    request_id = add(ahead, 1, GREEDY)
    for _ in range(3):
        step(ahead)
    assert ahead.engine._ahead is not None
    ahead.engine.abort_request(request_id)
    assert ahead.engine._ahead is None and ahead.engine.is_finished()
    assert_idle(ahead)


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
            assert [answers(outputs[request_id]) for request_id in ids] == want


@pytest.mark.parametrize("where", ["run", "schedule_ahead", "tokens", "postprocess"])
def test_an_interrupt_in_each_step(where, make_pair, monkeypatch):
    plain, ahead = make_pair(enable_prefix_caching=False)
    requests = [(0, SamplingParams(max_tokens=TOKENS, ignore_eos=True, n=2)), (2, GREEDY)]
    want = run(plain, requests)
    engine = ahead.engine
    owner = {"run": engine.model_runner, "tokens": Sampled}.get(where, engine.scheduler)
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
        assert [answers(outputs[request_id]) for request_id in ids] == want


@pytest.mark.parametrize("where", ["run", "tokens"])
@pytest.mark.parametrize("at", range(TOKENS + 1))
def test_a_failure_of_each_step(where, at, make_pair, monkeypatch):
    """Who was in it ends with an error and the tokens that came before; who came later does not."""
    plain, ahead = make_pair()
    fifth = run(plain, [(0, GREEDY)])[0][0][0][4]
    requests = [(1, GREEDY), (2, GREEDY), (0, SamplingParams(max_tokens=TOKENS, stop_token_ids=[fifth]))]
    want, late_want = run(plain, requests), run(plain, [(0, GREEDY)])
    owner = ahead.engine.model_runner if where == "run" else Sampled
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
            assert answers(output) == answer
    monkeypatch.undo()
    assert run(ahead, [(0, GREEDY)]) == late_want


@pytest.mark.parametrize("at", range(TOKENS))
def test_a_row_that_allows_no_token(at, make_pair, monkeypatch):
    """It goes on with any id for a step that counts for nothing."""
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
    assert answers(outputs[good]) == want[1]


def test_buffers_that_every_step_shares(make_pair, monkeypatch):
    """As CUDA graphs do: inputs and logits of a step lie where those of the last one lay."""
    monkeypatch.setattr(DecodeGraphs, "_capture", DecodeGraphs._compute)
    monkeypatch.setattr(DecodeGraphs, "_replay", DecodeGraphs._compute)
    plain, ahead = make_pair()
    ahead.engine.model_runner.capture_graphs(8, ahead.engine.max_model_len)
    assert run(ahead, MIXED, LATER) == run(plain, MIXED, LATER)


def test_statistics_count_every_step_once(ahead, monkeypatch):
    seen, steps = events(ahead, monkeypatch), []
    ahead.engine.on_step = steps.append
    prompt = ahead.processor(PROMPTS[1])
    run(ahead, [(1, GREEDY)])
    assert len(steps) == seen.count("launch") == TOKENS
    assert sum(stats.num_prefill_tokens for stats in steps) == len(prompt.token_ids)
    assert sum(stats.num_decode_tokens for stats in steps) == TOKENS - 1
    assert ["commit" in stats.seconds for stats in steps] == [False] * (TOKENS - 1) + [True]
    assert [stats.num_running for stats in steps] == [1] * (TOKENS - 1) + [0]


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
    """Answers to a request that runs alone and not ahead, by what it asks; computed once."""
    llm = LLM(checkpoint, dtype="float32", device="cpu", num_kvcache_blocks=64, skip_warmup=True)
    known = {}

    def answers_to(which: int, params: SamplingParams) -> list[tuple]:
        if (which, params) not in known:
            known[which, params] = run(llm, [(which, params)])[0]
        return known[which, params]

    yield answers_to
    llm.exit()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    actions=st.lists(action, max_size=30),
    block_size=st.sampled_from([1, 4, 7]),
    spare_blocks=st.integers(0, 40),
    budget=st.sampled_from([1, 5, 17, 4096]),
    max_num_seqs=st.integers(1, 4),
    caching=st.booleans(),
)
def test_random_runs(actions, block_size, spare_blocks, budget, max_num_seqs, caching, checkpoint, alone):
    """Whatever comes between, an answer is what it is alone, or the beginning of it."""
    llm = LLM(
        checkpoint,
        dtype="float32",
        device="cpu",
        kvcache_block_size=block_size,
        num_kvcache_blocks=-(-80 // block_size) + spare_blocks,  # room for the longest request alone, and a little more
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caching,
        skip_warmup=True,
    )
    llm.engine._launches_ahead = True
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
        for got, want in zip(answers(outputs[request_id]), alone(which, params), strict=True):
            assert got == want or (got[2] == "aborted" and got[0] == want[0][: len(got[0])])
    llm.exit()
