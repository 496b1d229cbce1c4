"""Steps on several ranks, in threads: tokens equal one rank's and transformers', errors are undone alike."""

import threading

import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.processes.ranks import ConnectedRanks
from mmvllm.worker.model_runner import ModelRunner
from tests.helpers.engine.engines import assert_idle, run_at_once
from tests.helpers.engine.rank_threads import FailingOnce, use_rank_threads
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.models.parity import REQUESTS
from tests.helpers.needs import needs

pytestmark = pytest.mark.thinned

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
# Of each family, with both ways to split key-value heads over two ranks; over three; and dense layers among experts.
SPLITS = [
    *[(shape, 2) for shape in ("gqa2-tied", "mha-untied", "windows4-tied", "windows2-vit80-untied")],
    *[(shape, 2) for shape in ("deepstack3-tied", "deepstack1-vit72-untied", "experts8-top3", "experts4-top2-vit72")],
    *[(shape, 2) for shape in ("qwen2-gqa3-tied", "qwen3-wide-heads-tied")],
    *[(shape, 3) for shape in ("deepstack3-vit80-untied", "qwen3-mqa-untied")],
]


@pytest.fixture(autouse=True)
@needs("network")
def ranks_in_threads(monkeypatch):
    use_rank_threads(monkeypatch)


def requests_of(shape: str) -> list[dict]:
    return [REQUESTS["text"]] if shape.startswith(("qwen2-", "qwen3-")) else list(REQUESTS.values())


def tokens(llm, requests, params=GREEDY) -> list[list[int]]:
    outputs = llm.generate_multimodal(requests, params)
    assert_idle(llm)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


@pytest.mark.essential(1)
@pytest.mark.parametrize(("shape", "size"), SPLITS)
def test_greedy_tokens_equal_one_rank_and_transformers(shape, size, checkpoints, reference, make_llm):
    requests = requests_of(shape)
    got = tokens(make_llm(checkpoints(shape), tensor_parallel_size=size), requests)
    assert got == tokens(make_llm(checkpoints(shape)), requests)
    if shape in ("gqa2-tied", "deepstack3-vit80-untied"):
        whole = [reference(shape).generate(request) for request in requests]
        assert got == [token_ids[: GREEDY.max_tokens] for token_ids in whole]


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_quantized_weights(quantization, checkpoints, make_llm):
    """Scales are computed from a rank's part of a row, so tokens may differ from one rank's."""
    options = {"quantization": quantization, "dtype": "bfloat16" if quantization == "fp8" else "float32"}
    folder = checkpoints("gqa2-tied")
    one, two = (make_llm(folder, tensor_parallel_size=size, **options) for size in (1, 2))
    got = tokens(two, requests_of("gqa2-tied"))
    assert [len(token_ids) for token_ids in got] == [GREEDY.max_tokens] * len(got)
    first = [(a[0], b[0]) for a, b in zip(got, tokens(one, requests_of("gqa2-tied")), strict=True)]
    assert sum(a == b for a, b in first) > len(first) / 2


def test_random_weights_are_those_of_one_rank(checkpoints, make_llm):
    one, two = (
        make_llm(checkpoints("gqa2-tied"), load_format="dummy", tensor_parallel_size=size, seed=3) for size in (1, 2)
    )
    assert tokens(two, requests_of("gqa2-tied")) == tokens(one, requests_of("gqa2-tied"))


def test_images_are_dealt_out_and_each_is_encoded_once(checkpoints, make_llm, monkeypatch):
    encoded = []
    encode = ModelRunner._encode_own

    def watched(self, items):
        encoded.append((self.ranks.rank, [item.num_patches for item in items]))
        encode(self, items)

    monkeypatch.setattr(ModelRunner, "_encode_own", watched)
    images = [noise_image(56 * n, 56, n) for n in (1, 2, 3, 4)]
    llm = make_llm(checkpoints("gqa2-tied"), tensor_parallel_size=2)
    llm.generate_multimodal([ask(*images, "?")] * 2, GREEDY)
    assert sorted(rank for rank, _ in encoded) == [0, 1]
    assert sum(sum(patches) for _, patches in encoded) == sum(16 * n for n in (1, 2, 3, 4))
    assert {sum(patches) for _, patches in encoded} == {16 * 5}


def test_a_size_that_does_not_divide_the_heads_is_refused(checkpoints, make_llm):
    message = "tensor_parallel_size is 3; this model's 4 attention and 2 key-value heads can be split over 1, 2 or 4"
    with pytest.raises(ValueError, match=message):
        make_llm(checkpoints("gqa2-tied"), tensor_parallel_size=3)


def test_too_few_devices_are_refused(checkpoints, make_llm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    message = "device is 'cuda:1' and tensor_parallel_size is 4, but this torch .* sees 3 CUDA devices"
    with pytest.raises(ValueError, match=message):
        make_llm(checkpoints("gqa2-tied"), tensor_parallel_size=4, device="cuda:1")


@pytest.mark.essential(1)
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
@pytest.mark.parametrize("method", ["_encode_own", "_mm_embeds", "append"])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_on_one_rank_is_taken_back_by_all(rank, step, method, ahead, checkpoints, make_llm, monkeypatch):
    """Wherever it happens in a step: the other rank completes it, and both compute again."""
    folder, requests = checkpoints("gqa2-tied"), list(REQUESTS.values())
    expected = run_at_once(make_llm(folder), requests)
    llm = make_llm(folder, tensor_parallel_size=2, async_scheduling=ahead, enable_prefix_caching=False)
    failing = FailingOnce(monkeypatch, rank, step, torch.OutOfMemoryError("CUDA out of memory"), method)
    assert run_at_once(llm, requests) == expected
    assert failing.has_failed == (method != "_encode_own" or step == 1)
    assert run_at_once(llm, requests) == expected
    assert_idle(llm)


@pytest.mark.parametrize("rank", [0, 1])
def test_another_error_on_one_rank_ends_the_requests_of_the_step(rank, checkpoints, make_llm, monkeypatch):
    folder = checkpoints("gqa2-tied")
    llm = make_llm(folder, tensor_parallel_size=2)
    FailingOnce(monkeypatch, rank, 2, RuntimeError("no such kernel"), "_mm_embeds")
    groups = [llm.engine.add(llm.processor(REQUESTS[name]), GREEDY) for name in ("text", "one")]
    while not llm.engine.is_finished():
        llm.engine.step()
    reason = "rank 1: RuntimeError: no such kernel" if rank else "no such kernel"
    assert [group.output.error for group in groups] == [f"the step failed: RuntimeError: {reason}"] * 2
    assert tokens(llm, [REQUESTS["one"]]) == tokens(make_llm(folder), [REQUESTS["one"]])


def test_an_interrupted_step_is_computed_again_by_all_ranks(checkpoints, make_llm):
    folder = checkpoints("gqa2-tied")
    expected = tokens(make_llm(folder), [REQUESTS["one"]])
    llm = make_llm(folder, tensor_parallel_size=2)
    engine, confirm = llm.engine, llm.engine.model_runner.worker_group.confirm
    for step in range(1, 6):
        calls = []

        def interrupted(step=step, calls=calls):
            calls.append(None)
            if len(calls) == step:
                raise KeyboardInterrupt
            confirm()

        engine.model_runner.worker_group.confirm = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.generate_multimodal([REQUESTS["one"]], GREEDY)
        engine.model_runner.worker_group.confirm = confirm
        assert tokens(llm, [REQUESTS["one"]]) == expected


def test_operations_other_than_those_of_the_step_are_refused():
    ranks = ConnectedRanks(None, 0, 2, torch.device("cpu"))
    ranks.expect([])
    with pytest.raises(AssertionError, match="must be None"):
        ranks.all_reduce(torch.ones(2))


def test_the_number_of_threads_is_restored(checkpoints, make_llm):
    before = torch.get_num_threads()
    llm = make_llm(checkpoints("gqa2-tied"), tensor_parallel_size=2)
    llm.exit()
    assert torch.get_num_threads() == before
    assert not [thread for thread in threading.enumerate() if type(thread).__name__ == "RankThread"]
