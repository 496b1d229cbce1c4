"""Decode steps padded into fixed buffers, as CUDA graphs need them; test_gpu captures and replays real graphs."""

import pytest

from mmvllm import SamplingParams
from mmvllm.worker import decode_graphs, mixed_graphs
from mmvllm.worker.decode_graphs import DecodeGraphs, graph_sizes
from tests.helpers.engine.engines import run_at_once
from tests.helpers.models.parity import REQUESTS
from tests.helpers.models.shapes import every_family

pytestmark = pytest.mark.thinned


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 100, 256, 1000])
def test_graph_sizes_cover_every_step_with_little_padding(max_num_seqs):
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(max_num_seqs, 256)
    for S in range(1, sizes[-1] + 1):
        size = min(size for size in sizes if size >= S)
        assert size - S < max(S, 16)


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("max_num_seqs", [3, 16])
def test_padded_steps_give_the_same_tokens(max_num_seqs, checkpoint, make_llm, replayed):
    # A small budget, so that prompts are computed, and completions end, one after the other.
    options = {"max_num_seqs": max_num_seqs, "kvcache_block_size": 4, "max_num_batched_tokens": 60}
    requests = list(REQUESTS.values())
    want = run_at_once(make_llm(checkpoint, enforce_eager=True, **options), requests)
    assert not replayed
    llm = make_llm(checkpoint, **options)
    llm.engine.model_runner.kv_cache[:, :, -1] = float("nan")  # padding rows read it, and nothing else does
    assert run_at_once(llm, requests) == want
    # The batch shrank: rows of longer ones became padding.
    assert len(set(replayed[DecodeGraphs])) > 1


def test_a_step_that_is_too_large_or_has_a_prefill_runs_eagerly(checkpoint, make_llm, replayed, monkeypatch):
    monkeypatch.setattr(mixed_graphs, "NUM_TOKENS", ())
    monkeypatch.setattr(decode_graphs, "LARGEST", 2)
    llm = make_llm(checkpoint, max_num_seqs=4)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    outputs = llm.generate([[5, 6, 7 + i] for i in range(4)], params)
    assert not replayed and all(len(output.token_ids) == 5 for output in outputs)
    llm.generate([[9, 6, 7]], params)
    assert replayed[DecodeGraphs] == [1] * 4


@pytest.mark.slow
@every_family
def test_logits_are_those_of_the_eager_step(checkpoint, make_llm, replayed):
    """Except for rounding, which depends on the number of rows."""
    eager, padded = (make_llm(checkpoint, max_num_seqs=4, enforce_eager=eager) for eager in (True, False))
    for llm in (eager, padded):
        for i in range(3):
            llm.engine.add_request([5, 6, 7, 8 + i], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=20))
    done = [[], []]
    for llm, outputs in zip((eager, padded), done, strict=True):
        while not llm.engine.is_finished():
            outputs += llm.engine.step()[0]
    assert replayed
    for one, other in zip(*done, strict=True):
        assert one.token_ids == other.token_ids
        for logprobs, others in zip(one.logprobs, other.logprobs, strict=True):
            assert logprobs == pytest.approx(others, abs=1e-5)
