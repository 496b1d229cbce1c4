"""Steps launched before the tokens of the previous step are known change no completion and no state."""

import pytest

from mmvllm import SamplingParams
from mmvllm.worker.decode_graphs import DecodeGraphs
from mmvllm.worker.mixed_graphs import MixedGraphs
from tests.helpers.engine.ahead import GREEDY, LATER, MIXED, PROMPTS, TOKENS, add, finish, record_events, run, step
from tests.helpers.models.shapes import every_family

pytestmark = pytest.mark.thinned


def test_one_step_is_launched_ahead_and_none_beyond_max_tokens(ahead, monkeypatch):
    seen = record_events(ahead, monkeypatch)
    run(ahead, [(1, SamplingParams(max_tokens=4, ignore_eos=True))])
    assert seen == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.1}, {"presence_penalty": 1}, {"logprobs": 0}])
def test_penalties_and_logprobs_are_launched_ahead(params, ahead, monkeypatch):
    seen = record_events(ahead, monkeypatch)
    run(ahead, [(0, SamplingParams(max_tokens=4, ignore_eos=True, **params))])
    assert seen == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]


def test_chunks_of_prompts_are_launched_ahead(make_pair, monkeypatch):
    _, ahead = make_pair(max_num_batched_tokens=10)
    seen = record_events(ahead, monkeypatch)
    assert len(ahead.processor(PROMPTS[0]).token_ids) == 23
    run(ahead, [(0, SamplingParams(max_tokens=2, ignore_eos=True))])
    assert seen == ["launch", *["launch", "wait"] * 3, "wait"]


def test_a_cpu_does_not_launch_ahead(make_pair, monkeypatch):
    plain, _ = make_pair()
    seen = record_events(plain, monkeypatch)
    run(plain, [(0, SamplingParams(max_tokens=4, ignore_eos=True))])
    assert seen == ["launch", "wait"] * 4


@pytest.mark.parametrize("max_num_seqs, launches", [(1, [12, 12]), (2, [6, 7])])
def test_a_waiting_request_starts_when_another_has_reached_max_tokens(max_num_seqs, launches, make_pair, monkeypatch):
    """Its row is free once its last token is seen: that is one step later where another step was launched meanwhile."""
    counts = []
    for llm in make_pair(max_num_seqs=max_num_seqs):
        seen = record_events(llm, monkeypatch)
        run(llm, [(0, SamplingParams(max_tokens=length, ignore_eos=True)) for length in (2, 6, 4)])
        counts.append(seen.count("launch"))
    assert counts == launches


def test_a_sequence_is_preempted_while_it_is_in_flight(make_pair):
    """Two prompts of 6 blocks fit, each with a free slot in its last block; their completions do not."""
    plain, ahead = make_pair(num_kvcache_blocks=13, enable_prefix_caching=False)
    requests = [(0, GREEDY), (0, SamplingParams(temperature=1.0, seed=6, max_tokens=TOKENS, ignore_eos=True))]
    assert len(ahead.processor(PROMPTS[0]).token_ids) == 23
    assert run(ahead, requests) == run(plain, requests)
    assert ahead.engine.scheduler.num_preemptions > 0 and plain.engine.scheduler.num_preemptions > 0


def test_a_step_ahead_serves_the_first_sequences_first(make_pair):
    _, ahead = make_pair()
    engine = ahead.engine
    for _ in range(2):
        add(ahead, 0, GREEDY)
    step(ahead)
    engine.scheduler.max_num_batched_tokens = 1
    for _ in range(6):
        step(ahead)
    first, second = (seq.num_completion_tokens for seq in engine.scheduler.running)
    assert first == 7 and second == 2
    finish(ahead)


@pytest.mark.essential(2)
@pytest.mark.slow
@every_family
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
        {"encoder_cache_rows": 12, "enable_prefix_caching": False},
        {"max_model_len": 60},
    ],
    ids=str,
)
def test_completions_are_the_same(options, make_pair):
    plain, ahead = make_pair(**options)
    for _ in range(2):  # cold, then from the caches
        want = run(plain, MIXED, LATER)
        assert run(ahead, MIXED, LATER) == want
    for llm in (plain, ahead):
        assert llm.engine.scheduler.num_preemptions > 0 or "num_kvcache_blocks" not in options


@pytest.mark.thinned(2)
@every_family
def test_the_prefix_cache_is_the_same(make_pair):
    """Blocks with generated tokens included."""
    plain, ahead = make_pair(kvcache_block_size=2)
    contents = []
    for llm in (plain, ahead):
        run(llm, MIXED[:4])
        contents.append(sorted(key[1] for key in llm.engine.scheduler.block_manager.cached))
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_a_stop_token_at_each_position(make_pair):
    """The other sequence of the batch, whose steps continue, is not affected."""
    plain, ahead = make_pair()
    alone = run(plain, [(1, GREEDY)])[0][0][0]
    for end in range(TOKENS):
        stopping = SamplingParams(max_tokens=TOKENS, ignore_eos=True, stop_token_ids=[alone[end]])
        requests = [(1, stopping), (2, GREEDY), (1, stopping)]
        want = run(plain, requests)
        assert want[0][0][:1] == (alone[: alone.index(alone[end]) + 1],)
        assert run(ahead, requests) == want


@pytest.mark.slow
@every_family
def test_buffers_that_are_reused_by_every_step(make_pair, replayed):
    """Inputs and logits of a step overwrite the previous step's, as with CUDA graphs."""
    plain, ahead = make_pair(enforce_eager=True)
    ahead.engine.model_runner.capture_graphs(8, ahead.engine.max_model_len)
    assert run(ahead, MIXED, LATER) == run(plain, MIXED, LATER)
    assert set(replayed) == {DecodeGraphs, MixedGraphs}


def test_statistics_count_every_step_once(ahead, monkeypatch):
    seen, steps = record_events(ahead, monkeypatch), []
    ahead.engine.on_step, ahead.engine.executor.clock = steps.append, "device"
    prompt = ahead.processor(PROMPTS[1])
    run(ahead, [(1, GREEDY)])
    assert len(steps) == seen.count("launch") == TOKENS
    assert sum(stats.num_prefill_tokens for stats in steps) == len(prompt.token_ids)
    assert sum(stats.num_decode_tokens for stats in steps) == TOKENS - 1
    assert ["commit" in stats.seconds for stats in steps] == [False] * (TOKENS - 1) + [True]
    assert [stats.num_running for stats in steps] == [1] * (TOKENS - 1) + [0]
