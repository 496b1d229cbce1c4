"""Searches in the scheduler, without a model: the same hypotheses whatever blocks, budgets and preemptions allow."""

import random

import pytest

from mmvllm import SamplingParams
from mmvllm.scheduler.beam_search import BeamSearch, Candidate
from mmvllm.scheduler.beams import Beams
from mmvllm.scheduler.block_manager import BlockManager
from mmvllm.scheduler.encoder_cache import EncoderCache
from mmvllm.scheduler.output import SchedulerOutput
from mmvllm.scheduler.sampler_output import SamplerOutput
from mmvllm.scheduler.scheduler import Scheduler
from mmvllm.scheduler.sequence import FinishReason, Sequence, SequenceGroup

BLOCK_SIZE, MAX_TOKENS = 4, 11
END_IDS = [5, 6, 7]
NEXT = 3  # what follows in sequences that are not beams


def scheduler(num_blocks=200, caching=True, **limits) -> Scheduler:
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 500, "max_vision_patches": 64} | limits
    blocks = BlockManager(num_blocks, BLOCK_SIZE, caching)
    return Scheduler(blocks, EncoderCache(100, 1), at_length, **limits)


def at_length(seq: Sequence) -> FinishReason | None:
    return FinishReason.LENGTH if seq.num_tokens >= seq.max_num_tokens else None


def search(name: str, width: int, num_tokens: int) -> SequenceGroup:
    params = SamplingParams(beam_width=width, max_tokens=MAX_TOKENS)
    token_ids = random.Random(name).choices(range(100), k=num_tokens)
    seqs = [Sequence(token_ids, params, request_id=name, block_size=BLOCK_SIZE) for _ in range(width)]
    return SequenceGroup(seqs, beams=Beams(BeamSearch(width, max_length=MAX_TOKENS, end_ids=END_IDS), seqs))


def plain(name: str, num_tokens: int) -> SequenceGroup:
    params = SamplingParams(max_tokens=MAX_TOKENS)
    return SequenceGroup([Sequence([1] * num_tokens, params, request_id=name, block_size=BLOCK_SIZE)])


def groups() -> list[SequenceGroup]:
    searches = [search("a", 3, 9), search("b", 4, 17), search("c", 2, 4), search("d", 1, 8)]
    return [*searches[:2], plain("e", 6), *searches[2:]]


def candidates(seq: Sequence) -> list[Candidate]:
    """Candidates that depend on the sequence's tokens alone, as a model's do."""
    choose = random.Random(str(seq.token_ids))
    ids = choose.sample(range(40), 10)
    return [Candidate(token_id, logprob) for token_id, logprob in zip(ids, _descending(choose), strict=True)]


def _descending(choose: random.Random) -> list[float]:
    return sorted((-choose.uniform(0.2, 4) for _ in range(10)), reverse=True)


class Model:
    """Computes tokens into blocks, and asserts that each sequence reads its own."""

    def __init__(self):
        self.written: dict[int, int] = {}  # slot -> token

    def run(self, step: SchedulerOutput) -> SamplerOutput:
        copies = [copy for chunk in step.chunks for copy in chunk.block_copies]
        copied = {new * BLOCK_SIZE + i: self.written.get(old * BLOCK_SIZE + i) for old, new in copies for i in range(4)}
        self.written |= copied
        texts = [[*chunk.seq.token_ids, NEXT][: chunk.end] for chunk in step.chunks]  # with a token in flight
        for chunk, text in zip(step.chunks, texts, strict=True):
            for i in range(chunk.start, chunk.end):
                self.written[self._slot(chunk.seq, i)] = text[i]
        for chunk, text in zip(step.chunks, texts, strict=True):
            read = [self.written[self._slot(chunk.seq, i)] for i in range(chunk.end)]
            assert read == text, "a sequence reads what it did not write"
        sampled = [chunk.seq for chunk in step.chunks if chunk.samples]
        found = {at: candidates(seq) for at, seq in enumerate(sampled) if seq.is_beam}
        return SamplerOutput([NEXT] * len(sampled), candidates=found)

    @staticmethod
    def _slot(seq: Sequence, i: int) -> int:
        return seq.block_table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE


def hypotheses(sched: Scheduler, groups: list[SequenceGroup], ahead=False, preempt=lambda sched: None) -> dict:
    """Run all groups to their end, each step launched before the one before is committed where `ahead`."""
    model, in_flight, searches = Model(), [], {group.request_id: group for group in groups if group.beams is not None}
    for group in groups:
        sched.add(group)
    for _ in range(5000):
        if sched.is_finished():
            assert sched.block_manager.num_free_blocks == sched.block_manager.num_blocks
            return {name: group.beams.search.hypotheses() for name, group in searches.items()}
        while len(in_flight) < 1 + ahead:
            step = sched.schedule()
            in_flight.append((step, model.run(step)))
        sched.check()
        sched.postprocess(*in_flight.pop(0))
        sched.check()
        preempt(sched)
    raise AssertionError("the requests never finish")


@pytest.fixture(scope="module")
def expected() -> dict:
    return hypotheses(scheduler(), groups())


def test_the_search_alone_finds_the_same(expected):
    for group in groups():
        if group.beams is not None:
            assert hypotheses(scheduler(), [group]) == {group.request_id: expected[group.request_id]}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("seed", range(40))
def test_hypotheses_do_not_depend_on_blocks_budgets_and_preemptions(seed, expected):
    choose = random.Random(seed)
    limits = {
        "num_blocks": choose.choice([7, 8, 9, 12, 20, 200]),
        "max_num_seqs": choose.choice([4, 5, 6, 64]),
        "max_num_batched_tokens": choose.choice([1, 2, 5, 20, 500]),
        "caching": choose.random() < 0.5,
    }
    frequency = choose.choice([0, 0.05, 0.2])

    def preempt(sched: Scheduler) -> None:
        for seq in list(sched.running):
            if sched.num_preemptions < 300 and choose.random() < frequency:
                sched.preempt(seq)

    found = hypotheses(scheduler(**limits), groups(), ahead=choose.random() < 0.5, preempt=preempt)
    assert found == expected, limits


def test_beams_take_turns_where_memory_ran_out(expected):
    """At most one sequence runs at once for a while: a beam that waits for the others gives its place to them."""
    sched = scheduler()
    sched.reduce_batch_size(2)
    assert sched.seq_limit == 1
    group = search("b", 4, 17)
    assert hypotheses(sched, [group]) == {"b": expected["b"]}
    assert sched.num_preemptions > 0


def test_a_beam_that_waits_for_others_is_not_computed_again():
    sched, model, group = scheduler(max_num_batched_tokens=9), Model(), search("a", 3, 9)
    sched.add(group)
    step = sched.schedule()
    sched.postprocess(step, model.run(step))
    sched.max_num_batched_tokens = 2
    step = sched.schedule()
    sched.postprocess(step, model.run(step))
    held = [seq for seq in sched.running if group.beams.holds(seq)]
    assert len(held) == 2 and len(sched.waiting) == 1
    sched.preempt(held[0])
    assert held[0] not in sched.waiting
    sched.check()
    step = sched.schedule()
    assert [chunk.seq for chunk in step.chunks] == [seq for seq in group.seqs if seq not in held]
    sched.postprocess(step, model.run(step))
    assert not any(group.beams.holds(seq) for seq in group.seqs)
    sched.check()


def test_a_search_without_candidates_ends_with_an_error():
    sched, group = scheduler(), search("a", 3, 9)
    sched.add(group)
    assert sched.postprocess(sched.schedule(), SamplerOutput([0], candidates={0: []})) == [group]
    assert "logits are not numbers" in group.error
    sched.check()


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_frees_all(steps):
    sched, model, group = scheduler(max_num_seqs=3), Model(), search("a", 3, 9)
    sched.add(group)
    for _ in range(steps):
        step = sched.schedule()
        sched.postprocess(step, model.run(step))
    assert sched.abort_seq_group("a", FinishReason.ABORTED) is group
    sched.check()
    assert sched.is_finished() and sched.block_manager.num_free_blocks == 200
    assert not sched.running and not sched.waiting
