"""What ranks disagree on after a failure, an interrupt or a step that was dropped: nothing; ranks run in threads."""

import sys
from dataclasses import replace

import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.errors import EngineFailed
from mmvllm.processes.channel import SharedBuffer
from mmvllm.processes.ranks import ConnectedRanks, Operation, RanksFailed
from mmvllm.worker import multiprocess_group
from tests.helpers.engine.engines import assert_idle, run_at_once
from tests.helpers.engine.rank_threads import FailingOnce, use_rank_threads
from tests.helpers.models.parity import REQUESTS
from tests.helpers.needs import needs

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture(autouse=True)
@needs("network")
def ranks_in_threads(monkeypatch):
    use_rank_threads(monkeypatch)


@pytest.fixture
def make(checkpoints, make_llm):
    return lambda size=2, **options: make_llm(checkpoints("gqa2-tied"), tensor_parallel_size=size, **options)


@pytest.fixture
def limited_wait(monkeypatch):
    """A test that fails does not wait for long."""
    monkeypatch.setattr("mmvllm.processes.ranks.TIMEOUT", multiprocess_group.CONNECT_TIMEOUT / 20)


def answers(llm, names, params=GREEDY) -> list[list[int]]:
    return run_at_once(llm, [REQUESTS[name] for name in names], params)


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_between_encoding_and_sharing(rank, make, monkeypatch):
    """The rank has the rows of its images, but the other has not got them."""
    expected = answers(make(1), REQUESTS)
    llm = make()
    failing = FailingOnce(monkeypatch, rank, 1, OUT_OF_MEMORY, "_broadcast_encoder_outputs")
    assert answers(llm, REQUESTS) == expected
    assert failing.has_failed
    assert_idle(llm)


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_while_blocks_are_copied(rank, make, monkeypatch, limited_wait):
    params = replace(GREEDY, n=3)
    prompts = [REQUESTS["text"], REQUESTS["one"]]
    expected = run_at_once(make(1), prompts, params)
    llm = make()
    failing = FailingOnce(monkeypatch, rank, 1, OUT_OF_MEMORY, "_copy_blocks")
    assert run_at_once(llm, prompts, params) == expected
    assert failing.has_failed
    assert_idle(llm)


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_dropped_step_that_failed_to_encode(size, rank, make, monkeypatch):
    """Its images are encoded again for the next request."""
    expected = answers(make(1), ["one"])
    llm = make(size, async_scheduling=True)
    first = llm.engine.add_request(llm.processor(REQUESTS["text"]), GREEDY)
    llm.engine.step()
    second = llm.engine.add_request(llm.processor(REQUESTS["one"]), GREEDY)
    failing = FailingOnce(
        monkeypatch, rank, 1, OUT_OF_MEMORY, "_broadcast_encoder_outputs" if size > 1 else "_encode_own", size
    )
    llm.engine.step()  # launches the second request
    llm.engine.abort_request(first)
    llm.engine.abort_request(second)
    assert failing.has_failed and llm.engine.is_finished()
    assert answers(llm, ["one"]) == expected
    assert_idle(llm)


def test_an_interrupt_between_the_reports_of_two_ranks(checkpoints, make_llm, monkeypatch):
    """A report that was read counts; the step is computed again."""
    folder, request = checkpoints("deepstack3-vit80-untied"), REQUESTS["one"]
    expected = run_at_once(make_llm(folder), [request])
    llm = make_llm(folder, tensor_parallel_size=3)
    pipe = llm.engine.model_runner.worker_group._channels[1].pipe
    with monkeypatch.context() as patch:
        for method in ("poll", "recv"):
            patch.setattr(pipe, method, _interrupt, raising=True)
        with pytest.raises(KeyboardInterrupt):
            run_at_once(llm, [request])
    llm.engine.abort_request(next(iter(llm.engine.scheduler.groups)))
    assert run_at_once(llm, [request]) == expected


def _interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupt_while_a_dropped_step_is_settled(make, monkeypatch):
    """The reports of later steps are their own: a failure is that of its step."""
    expected = answers(make(1), ["text"])
    llm = make(async_scheduling=True)
    worker_group = llm.engine.model_runner.worker_group
    llm.engine.add_request(llm.processor(REQUESTS["text"]), GREEDY, "dropped")
    for _ in range(3):
        llm.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(worker_group, "settle", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.abort_request("dropped")
    group = llm.engine.add(llm.processor(REQUESTS["text"]), GREEDY)
    llm.engine.step()
    assert len(worker_group._sent) == 1, "only the step that was launched ahead"
    while not llm.engine.is_finished():
        llm.engine.step()
    assert [group.output.token_ids] == expected


def test_no_rank_gets_a_step_that_cannot_be_packed_for_all(checkpoints, make_llm, monkeypatch, limited_wait):
    folder, requests = checkpoints("deepstack3-vit80-untied"), [REQUESTS["one"], REQUESTS["text"]]
    expected = run_at_once(make_llm(folder), requests)
    llm = make_llm(folder, tensor_parallel_size=3)
    for_rank, failed = multiprocess_group._for_rank, []

    def failing(inputs, rank):
        if rank == 2 and not failed:
            failed.append(rank)
            raise MemoryError
        return for_rank(inputs, rank)

    monkeypatch.setattr(multiprocess_group, "_for_rank", failing)
    assert run_at_once(llm, requests) == expected
    assert failed


def test_shared_memory_for_some_of_the_buffers_only_is_not_used(make, monkeypatch):
    create, made = SharedBuffer.create, []

    def scarce():
        made.append(None)
        return create() if len(made) == 1 else None

    monkeypatch.setattr(SharedBuffer, "create", scarce)
    llm = make()
    assert llm.engine.model_runner.worker_group._channels[0]._buffers == []
    assert answers(llm, REQUESTS) == answers(make(1), REQUESTS)


@pytest.mark.slow
def test_a_rank_that_cannot_complete_a_step_ends_all_requests(make, monkeypatch, limited_wait):
    llm = make()
    group = llm.engine.add(llm.processor(REQUESTS["one"]), GREEDY)
    FailingOnce(monkeypatch, 0, 1, OUT_OF_MEMORY, "_mm_embeds")
    real = torch.zeros

    def zeros(*args, **options):
        if sys._getframe(1).f_code.co_name == "_take_part":
            raise OUT_OF_MEMORY
        return real(*args, **options)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(multiprocess_group, "REASON_SECONDS", 0.1)
    reason = "the engine failed: RanksFailed: rank 0 could not complete a step: OutOfMemoryError: CUDA out of memory"
    with pytest.raises(EngineFailed, match=reason):
        llm.engine.step()
    assert group.output.error == reason


def test_an_operation_that_has_failed_is_not_waited_for_again():
    class Backend:
        calls = 0

        def allreduce(self, tensors):
            self.calls += 1
            raise RuntimeError("Timed out")

    backend = Backend()
    ranks = ConnectedRanks(backend, 0, 2, torch.device("cpu"))
    x = torch.ones(2)
    ranks.expect([Operation("all_reduce", (2,), x.dtype)] * 3)
    with pytest.raises(RanksFailed):
        ranks.all_reduce(x)
    ranks.complete()
    assert backend.calls == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_engines_of_one_process_restore_the_number_of_threads(order, make):
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        llms = [make(2), make(4)]
        assert torch.get_num_threads() == 2
        for i in order:
            assert torch.get_num_threads() < 8
            llms[i].exit()
        assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)
