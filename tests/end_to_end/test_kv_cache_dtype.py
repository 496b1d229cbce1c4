"""Keys and values in 8 bits: the same tokens however steps are cut, and logits near the plain cache's."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.config import EngineConfig
from mmvllm.kernels import rotary
from mmvllm.models.folder import BUNDLED
from mmvllm.models.registry import load_config
from mmvllm.worker.memory import affordable_blocks, empty_kv_cache, kv_block_bytes
from tests.helpers.engine.engines import assert_idle, run_at_once
from tests.helpers.engine.rank_threads import use_rank_threads
from tests.helpers.engine.requests import ask
from tests.helpers.models.kernels import round_to_e4m3_exactly
from tests.helpers.models.parity import REQUESTS
from tests.helpers.models.reference import first_logits
from tests.helpers.models.shapes import TEXT_SHAPES, every_family, one_family

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


@pytest.mark.thinned(1)
@every_family
@pytest.mark.parametrize("budget", [4096, 1, 7, 30])
def test_tokens_do_not_depend_on_steps(budget, checkpoint, make_llm, alone):
    """Batched, in chunks, with look-ahead, and with prefixes from the cache."""
    llm = make_llm(checkpoint, max_num_batched_tokens=budget, async_scheduling=budget != 7)
    assert run_at_once(llm, ALL, GREEDY) == alone
    assert run_at_once(llm, ALL, GREEDY) == alone, "with prefixes from the cache"
    assert_idle(llm)


@pytest.mark.thinned(1)
def test_preempted(checkpoint, make_llm, alone):
    """The prompts fit together but their completions do not: sequences are preempted and computed again."""
    longest = len(make_llm(checkpoint).processor(ALL[2]).token_ids)
    llm = make_llm(checkpoint, num_kvcache_blocks=-(-(longest + 12) // 4) + 5, enable_prefix_caching=False)
    assert run_at_once(llm, [*ALL[:3], ALL[0]], GREEDY) == [*alone[:3], alone[0]]
    assert llm.engine.scheduler.num_preemptions > 0
    assert_idle(llm)


@pytest.mark.slow
def test_forked(checkpoint, make_llm, alone):
    """Completions and beams copy the block in which the prompt ends, with its scales."""
    llm = make_llm(checkpoint)
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=3)
    for request, want in zip(ALL, alone, strict=True):
        output = llm.generate_multimodal([request], params)[0]
        assert [completion.token_ids for completion in output.completions] == [want] * 3
    beams = SamplingParams(max_tokens=8, beam_width=3, n=3, ignore_eos=True)
    together = llm.generate_multimodal(ALL, beams)
    alone_in_chunks = make_llm(checkpoint, max_num_batched_tokens=7, enable_prefix_caching=False)
    for request, output in zip(ALL, together, strict=True):
        again = alone_in_chunks.generate_multimodal([request], beams)[0]
        assert [c.token_ids for c in again.completions] == [c.token_ids for c in output.completions]


@pytest.mark.network
def test_on_two_ranks(checkpoint, make_llm, alone, monkeypatch):
    use_rank_threads(monkeypatch)
    llm = make_llm(checkpoint, tensor_parallel_size=2)
    assert run_at_once(llm, ALL, GREEDY) == alone
    assert llm.engine.model_runner.kv_cache.values.shape[4] == 1  # of two key-value heads


def test_a_model_without_images(checkpoints, make_llm):
    llm = make_llm(checkpoints(TEXT_SHAPES[0]))
    together = run_at_once(llm, [ALL[0], ask("Hello."), ALL[0]], GREEDY)
    assert together == [run_at_once(llm, [request], GREEDY)[0] for request in (ALL[0], ask("Hello."), ALL[0])]
    assert_idle(llm)


@pytest.mark.essential(1)
@pytest.mark.slow
@one_family
def test_the_engine_on_the_kernels(checkpoint, make_llm, alone, monkeypatch):
    """One short request in the interpreter, with the kernels that write and read codes."""
    round_to_e4m3_exactly(monkeypatch)
    monkeypatch.setattr(rotary, "runs_triton", lambda x: True)
    llm = make_llm(checkpoint, attention_backend="triton")
    assert run_at_once(llm, ALL[:1], replace(GREEDY, max_tokens=4)) == [alone[0][:4]]


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_half_the_memory_and_a_scale_for_each_head(name):
    """At the sizes of Qwen2-VL-2B: 128 values of 1 byte and a scale of 4, in place of 256 bytes."""
    config = replace(
        load_config(BUNDLED), num_hidden_layers=28, num_key_value_heads=2, head_dim=128, mrope_section=None
    )
    options = EngineConfig(kv_cache_dtype=name, max_num_seqs=64)
    kv_dtype = options.resolve_kv_dtype(torch.bfloat16)
    size = kv_block_bytes(config, 16, kv_dtype)
    assert size == 2 * 28 * 16 * 2 * (128 + 4)
    assert empty_kv_cache(config, 3, 16, kv_dtype, torch.device("cpu")).nbytes == 3 * size
    assert affordable_blocks(10 * size + 1, options, config, 16, kv_dtype) == 10


STEPS = {"int8": 1 / 127, "fp8": 1 / 8}  # between codes: of a head's largest value, of each value at most


def test_the_error_of_the_logits_is_below_a_step_between_codes(reference, make_llm):
    """Values are rounded by at most half a step, and attention takes means of them."""
    inputs, step = reference(None).inputs(ALL[1]), STEPS[make_llm.keywords["kv_cache_dtype"]]
    plain = first_logits(make_llm(BUNDLED, kv_cache_dtype="auto").engine, inputs)
    got = first_logits(make_llm(BUNDLED).engine, inputs)
    assert 0 < (got - plain).norm() < step * (plain - plain.mean()).norm()
