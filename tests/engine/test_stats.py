"""Rates over the last seconds."""

from types import SimpleNamespace

import pytest

from mmvllm.engine import stats
from mmvllm.engine.stats import STEP_SIZES, EngineStats, Meter, StepStats


@pytest.fixture
def clock(monkeypatch):
    """Seconds, which the test sets."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now.seconds)
    return now


def stats_of(meter: Meter) -> EngineStats:
    blocks = SimpleNamespace(num_blocks=4, num_free_blocks=1)
    scheduler = SimpleNamespace(block_manager=blocks, waiting=[], running=[], num_preemptions=0)
    return meter.stats(scheduler, num_preparing=0)


def rates(meter: Meter) -> tuple[float, float]:
    current = stats_of(meter)
    return current.prompt_tokens_per_s, current.output_tokens_per_s


def step(clock, num_prompt_tokens: int) -> StepStats:
    none = dict.fromkeys(("num_images", "num_new_images", "num_patches", "num_waiting"), 0)
    own = {"num_prefill_tokens": num_prompt_tokens, "num_decode_tokens": 3, "num_running": 1, "num_used_blocks": 3}
    return StepStats(end=clock.seconds, seconds={}, **none, **own)


def test_rates_are_of_the_last_seconds(clock):
    meter = Meter()
    clock.seconds += 2
    meter.add_step(step(clock, 30))
    meter.add_outputs([], 4)
    assert rates(meter) == (15.0, 2.0)
    clock.seconds += 9
    meter.add_step(step(clock, 0))
    meter.add_outputs([], 6)
    assert rates(meter) == (3.0, 1.0)
    clock.seconds += 2
    assert rates(meter) == (0.0, 0.6)
    clock.seconds += 10
    assert rates(meter) == (0.0, 0.0)


def test_steps_are_counted_by_their_tokens_over_all_engines_and_restarts(clock):
    meters = [Meter(), Meter()]
    for meter, num_prompt_tokens in zip(meters, (5, 6), strict=True):  # 3 of decodes beside them
        meter.add_step(step(clock, num_prompt_tokens))
    meters[0].add_step(step(clock, STEP_SIZES[-1]))
    first, second = map(stats_of, meters)
    sizes = (first.totals() + second).step_sizes
    assert sizes.num_tokens == 8 + 9 + STEP_SIZES[-1] + 3
    assert {i: count for i, count in enumerate(sizes.counts) if count} == {1: 1, 2: 1, len(STEP_SIZES): 1}
