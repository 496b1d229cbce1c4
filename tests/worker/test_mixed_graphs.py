"""Small steps with prefills, padded into fixed buffers as CUDA graphs need them."""

import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.config import EngineConfig
from mmvllm.worker import memory, mixed_graphs
from mmvllm.worker.memory import graphs_bytes
from mmvllm.worker.mixed_graphs import MixedGraphs, step_sizes
from tests.helpers.engine.engines import GREEDY, run_at_once
from tests.helpers.models.parity import REQUESTS
from tests.helpers.models.shapes import every_family

pytestmark = pytest.mark.thinned

SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 16, 100, 256, 1000])
def test_step_sizes_are_few_and_have_room_for_every_small_step(max_num_seqs):
    sizes = step_sizes(max_num_seqs, 32768)
    assert len(sizes) <= 12 and sizes == sorted(sizes)
    assert {size.num_tokens for size in sizes} == {128, 256, 512}
    assert sizes[-1] == (512, min(max_num_seqs, 256)) and {0} <= {size.num_decodes for size in sizes}


def test_no_step_is_padded_with_more_tokens_than_a_sequence_may_have():
    assert step_sizes(4, 200) == [(128, 0), (128, 4), (200, 0), (200, 4)]
    assert step_sizes(4, 1) == []


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("budget", [20, 100])
def test_padded_steps_give_the_same_tokens_and_cache(budget, checkpoint, make_llm, replayed):
    """Prompts are computed in chunks, and beside sequences that decode."""
    options = {"max_num_seqs": 5, "kvcache_block_size": 4, "max_num_batched_tokens": budget}
    eager, padded = make_llm(checkpoint, enforce_eager=True, **options), make_llm(checkpoint, **options)
    for llm in (eager, padded):
        llm.engine.model_runner.kv_cache.zero_()
    padded.engine.model_runner.kv_cache[:, :, -1] = float("nan")  # only padding may read it
    requests = list(REQUESTS.values())
    for _ in range(2):  # cold, then from the caches
        assert run_at_once(padded, requests) == run_at_once(eager, requests)
    torch.testing.assert_close(
        padded.engine.model_runner.kv_cache[:, :, :-1], eager.engine.model_runner.kv_cache, rtol=1e-4, atol=1e-4
    )
    assert {size.num_decodes for size in replayed[MixedGraphs]} == {0, 5}


@pytest.mark.slow
@every_family
def test_logits_are_those_of_the_eager_step(checkpoint, make_llm, replayed):
    """Except for rounding, which depends on the number of rows."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 60}
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=20)
    logprobs = []
    for eager in (True, False):
        llm = make_llm(checkpoint, enforce_eager=eager, **options)
        outputs = llm.generate_multimodal(list(REQUESTS.values())[:3], params)
        logprobs.append([one for output in outputs for one in output.logprobs])
    assert replayed[MixedGraphs]
    for one, other in zip(*logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_a_step_that_does_not_fit_runs_eagerly(checkpoint, make_llm, replayed, monkeypatch):
    monkeypatch.setattr(mixed_graphs, "MAX_PREFILLS", 2)
    llm = make_llm(checkpoint, max_num_seqs=4, enable_prefix_caching=False)
    llm.generate([[5] * 30, [6, 7], [8]], SHORT)  # a sequence too many
    llm.generate([[5] * 512], SHORT)  # a token too many: one is for padding
    assert not replayed[MixedGraphs]
    llm.generate([[7] * 511], SHORT)
    llm.generate([[8] * 60, [9] * 50], SHORT)
    assert replayed[MixedGraphs] == [(512, 0), (128, 0)]


def test_a_step_takes_the_smallest_graph(checkpoint, make_llm, replayed):
    """Which depends on how many sequences decode beside."""
    llm = make_llm(checkpoint, max_num_seqs=40)
    for number in range(18):
        llm.engine.add_request([5, 6, number], GREEDY)
        llm.engine.step()
    assert replayed[MixedGraphs] == [(128, 0)] + [(128, 16)] * 11 + [(128, 16)] * 6


def test_memory_of_graphs_is_measured_on_the_largest_step(checkpoint, make_llm, monkeypatch):
    runner = make_llm(checkpoint).engine.model_runner
    steps = []
    runner.model.register_forward_hook(lambda module, args, output: steps.append((args[1].shape, len(output))))
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 130)
    config = EngineConfig(max_num_seqs=20)
    assert graphs_bytes(runner.model, config, runner.block_size, runner.dtype, runner.device) == 60
    assert steps == [((512, runner.model_config.mm_embed_size), memory.num_graph_logits(20))]
    assert memory.num_graph_logits(1000) == 264
