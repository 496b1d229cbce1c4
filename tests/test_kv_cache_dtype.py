"""Keys and values in 8 bits: the same tokens however steps are cut, and logits near those of the plain cache."""

from functools import partial

import pytest

from mmvllm import SamplingParams
from tests.helpers.engines import assert_idle, run_at_once
from tests.helpers.parity import REQUESTS
from tests.helpers.shapes import every_family

ALL = [REQUESTS[name] for name in ("text", "one", "two apart", "three")]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(params=["int8", "fp8"])
def make_llm(request, make_llm):
    """LLM(...) with such a cache, in blocks of 4."""
    return partial(make_llm, kv_cache_dtype=request.param, kvcache_block_size=4)


@pytest.fixture
def alone(checkpoint, make_llm) -> list[list[int]]:
    """Tokens of each request alone, with one prefill of the whole prompt and nothing from before."""
    llm = make_llm(checkpoint, enable_prefix_caching=False, async_scheduling=False)
    return [run_at_once(llm, [request], GREEDY)[0] for request in ALL]


@every_family
def test_tokens_do_not_depend_on_steps(checkpoint, make_llm, alone):
    """Batched, with look-ahead; in chunks of any size; and with prefixes from the cache."""
    for budget in (4096, 1, 7, 30):
        llm = make_llm(checkpoint, max_num_batched_tokens=budget, async_scheduling=budget != 7)
        assert run_at_once(llm, ALL, GREEDY) == alone, f"budget {budget}"
        assert run_at_once(llm, ALL, GREEDY) == alone, f"prefixes from the cache, budget {budget}"
        assert_idle(llm)


def test_preempted(checkpoint, make_llm, alone):
    """The prompts fit together but their completions do not: sequences are preempted and computed again."""
    longest = len(make_llm(checkpoint).processor(ALL[2]).token_ids)
    llm = make_llm(checkpoint, num_kvcache_blocks=-(-(longest + 12) // 4) + 5, enable_prefix_caching=False)
    assert run_at_once(llm, [*ALL[:3], ALL[0]], GREEDY) == [*alone[:3], alone[0]]
    assert llm.engine.scheduler.num_preemptions > 0
    assert_idle(llm)
