"""On a CUDA device: every family gives the tokens of transformers on the CPU, with chunks, caches and preemption."""

import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.kernels.common.accuracy import NUM_VALUES
from mmvllm.worker.mixed_graphs import MixedGraphs
from mmvllm.worker.vision_graphs import VisionGraphs
from tests.helpers.engine.engines import run_at_once
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.models.kernels import assert_no_worse
from tests.helpers.models.parity import GREEDY, REQUESTS, VIDEOS
from tests.helpers.models.reference import ExpertsOf, first_logits
from tests.helpers.models.shapes import IMAGE_SHAPES, RICHEST, every_family

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cuda():
    if not torch.cuda.is_available():
        pytest.fail("the gpu tests need a CUDA device, and this torch sees none")


@pytest.mark.parametrize("shape", IMAGE_SHAPES)
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("budget", [7, 4096])
def test_greedy_tokens_equal_transformers_on_the_cpu(shape, backend, budget, checkpoints, reference, make_llm):
    llm = make_llm(checkpoints(shape), device="cuda", attention_backend=backend, max_num_batched_tokens=budget)
    requests = REQUESTS | {f"{name} (video)": request for name, request in VIDEOS.items()}
    for _ in range(2):  # cold, then from the caches
        outputs = llm.generate_multimodal(list(requests.values()), GREEDY)
        for (name, request), output in zip(requests.items(), outputs, strict=True):
            assert output.token_ids == reference(shape).generate(request), name


@every_family
@pytest.mark.parametrize("max_num_seqs", [3, 64])
def test_cuda_graphs_give_the_same_tokens(max_num_seqs, checkpoint, make_llm):
    options = {"device": "cuda", "max_num_seqs": max_num_seqs, "skip_warmup": False}
    captured, eager = make_llm(checkpoint, **options), make_llm(checkpoint, enforce_eager=True, **options)
    assert captured.engine.model_runner.graphs and not eager.engine.model_runner.graphs
    requests = list(REQUESTS.values())
    assert run_at_once(captured, requests) == run_at_once(eager, requests)


@every_family
@pytest.mark.parametrize("budget", [40, 400])
def test_cuda_graphs_of_mixed_steps_give_the_same_tokens(budget, checkpoint, make_llm, monkeypatch):
    options = {"device": "cuda", "max_num_seqs": 20, "max_num_batched_tokens": budget, "skip_warmup": False}
    captured, eager = make_llm(checkpoint, **options), make_llm(checkpoint, enforce_eager=True, **options)
    real, sizes = MixedGraphs.run, []

    def run(graphs, inputs, mm_embeds):
        sizes.append(graphs._size(inputs))
        return real(graphs, inputs, mm_embeds)

    monkeypatch.setattr(MixedGraphs, "run", run)
    requests = list(REQUESTS.values())
    for _ in range(2):  # cold, then from the caches
        assert run_at_once(captured, requests) == run_at_once(eager, requests)
    assert {size.num_decodes for size in sizes} == {0, 16}


@every_family
def test_cuda_graphs_of_the_vit_give_the_same_tokens(checkpoint, make_llm, monkeypatch):
    options = {"device": "cuda", "max_num_seqs": 8, "skip_warmup": False}
    captured, eager = make_llm(checkpoint, **options), make_llm(checkpoint, enforce_eager=True, **options)
    real, sizes = VisionGraphs.run, []

    def run(graphs, size, patches, layout):
        sizes.append(size)
        return real(graphs, size, patches, layout)

    monkeypatch.setattr(VisionGraphs, "run", run)
    for requests in ([*REQUESTS.values()], [*VIDEOS.values()], [REQUESTS["one"]]):
        assert run_at_once(captured, requests) == run_at_once(eager, requests)
    assert sizes


@every_family
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_that_share_a_model_give_the_same_tokens(enforce_eager, checkpoint, make_llm):
    options = {"device": "cuda", "skip_warmup": False, "enforce_eager": enforce_eager}
    one, two = (make_llm(checkpoint, tensor_parallel_size=size, **options) for size in (1, 2))
    requests = list(REQUESTS.values())
    assert run_at_once(two, requests) == run_at_once(one, requests)


def test_the_bundled_model_generates_the_same_tokens_as_on_the_cpu(make_llm):
    from mmvllm.models.folder import BUNDLED

    requests = list(REQUESTS.values())
    gpu = make_llm(BUNDLED, device="cuda", skip_warmup=False)
    assert run_at_once(gpu, requests) == run_at_once(make_llm(BUNDLED), requests)


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 5, "min_p": 0.05}, {}])
def test_seeded_requests_are_reproducible(params, checkpoint, make_llm):
    llm = make_llm(checkpoint, device="cuda")
    drawn = SamplingParams(temperature=0.9, seed=11, max_tokens=16, ignore_eos=True, **params)
    requests = list(REQUESTS.values())
    assert run_at_once(llm, requests, drawn) == run_at_once(llm, requests, drawn)


@every_family
def test_preemption(checkpoint, make_llm):
    """The completions need more blocks than there are; they equal a CPU's with enough blocks."""
    few = make_llm(checkpoint, device="cuda", kvcache_block_size=4, num_kvcache_blocks=30, enable_prefix_caching=False)
    requests = list(REQUESTS.values())
    assert run_at_once(few, requests) == run_at_once(make_llm(checkpoint), requests)
    assert few.engine.scheduler.num_preemptions > 0


@every_family
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_launched_ahead_give_the_same_tokens_without_synchronization(
    temperature, checkpoint, make_llm, monkeypatch
):
    ahead, plain = (
        make_llm(checkpoint, device="cuda", skip_warmup=False, async_scheduling=is_async) for is_async in (True, False)
    )
    launch, launched = ahead.engine.executor.launch, []

    def watched():
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched.append(launch())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return launched[-1]

    monkeypatch.setattr(ahead.engine.executor, "launch", watched)
    params = SamplingParams(temperature=temperature, seed=1, min_tokens=3, max_tokens=20)
    want, got = (llm.generate_multimodal(list(REQUESTS.values()), params) for llm in (plain, ahead))
    assert [output.token_ids for output in got] == [output.token_ids for output in want]
    assert launched and not any(step.error for step in launched)


def test_kv_blocks_fill_the_allowed_memory(checkpoint, make_llm):
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 2 * 2**30) / total  # two GiB more than is used now
    # Enough sequences to use more blocks than fit.
    options = {"num_kvcache_blocks": None, "gpu_memory_utilization": share, "max_num_seqs": 200_000}
    llm = make_llm(checkpoint, device="cuda", **options)
    assert 2**30 < llm.engine.model_runner.kv_cache.nbytes < 2 * 2**30


@pytest.mark.parametrize("shape", IMAGE_SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["auto", "triton", "torch"])
def test_half_precision_runs(dtype, backend, shape, checkpoints, make_llm):
    llm = make_llm(checkpoints(shape), device="cuda", dtype=dtype, attention_backend=backend)
    outputs = llm.generate_multimodal(list(REQUESTS.values()), SamplingParams(max_tokens=8, ignore_eos=True))
    assert all(len(output.token_ids) == 8 for output in outputs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", RICHEST)
@pytest.mark.parametrize("backend", ["flash", "triton", "torch"])
def test_the_error_of_attention_is_at_most_twice_that_of_plain_torch(
    dtype, backend, shape, checkpoints, reference, make_llm
):
    if backend == "flash":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    checkpoint, hf = checkpoints(shape), reference(shape)
    options = {"device": "cuda", "dtype": dtype, "num_kvcache_blocks": 32, "enable_prefix_caching": False}
    engine = make_llm(checkpoint, attention_backend=backend, kvcache_block_size=256, **options).engine
    plain_engine = make_llm(checkpoint, attention_backend="torch", kvcache_block_size=16, **options).engine
    assert plain_engine.attention.__name__ == "TorchAttention"  # torch's own kernels take blocks of 256 only
    results = []
    for number in range(-(-NUM_VALUES // engine.model_config.vocab_size)):
        inputs = hf.inputs(ask(f"Question {number}: ", noise_image(91, 64, number), " What is it?"))
        with ExpertsOf() as exactly:
            exact = hf.in_float64(hf.logits, inputs)
        with ExpertsOf(exactly.chosen * 2):  # whose choice is not what differs between backends
            results.append([first_logits(one, inputs).cpu() for one in (engine, plain_engine)] + [exact])
    assert_no_worse(*map(torch.cat, zip(*results, strict=True)))
