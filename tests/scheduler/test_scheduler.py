"""The scheduler with a block manager and an encoder cache, and no model: what each step computes, and for whom."""

import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.inputs import MultiModalItem, PlaceholderRange
from mmvllm.scheduler.block_manager import BlockManager
from mmvllm.scheduler.encoder_cache import EncoderCache
from mmvllm.scheduler.output import SchedulerOutput
from mmvllm.scheduler.sampler_output import SamplerOutput
from mmvllm.scheduler.scheduler import Scheduler
from mmvllm.scheduler.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus

PAD = 99


def at_length(seq: Sequence) -> FinishReason | None:
    return FinishReason.LENGTH if seq.num_tokens >= seq.max_num_tokens else None


def scheduler(num_blocks=64, rows=100, block_size=4, **limits) -> Scheduler:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_vision_patches": 64} | limits
    return Scheduler(BlockManager(num_blocks, block_size), EncoderCache(rows, 1), at_length, **limits)


def image(name: str, offset: int, num_tokens: int) -> MultiModalItem:
    patches = torch.zeros(4 * num_tokens, 1, dtype=torch.uint8)
    return MultiModalItem("image", patches, (1, 2, 2 * num_tokens), name.encode(), PlaceholderRange(offset, num_tokens))


def group(name="r", num_tokens=6, max_tokens=3, n=1, mm_items=(), first_token=0, **keys) -> SequenceGroup:
    token_ids = list(range(first_token, first_token + num_tokens))
    for item in mm_items:
        token_ids[item.offset : item.end] = [PAD] * item.num_tokens
    params = SamplingParams(max_tokens=max_tokens, n=n)
    make = {"request_id": name, "block_size": 4, "mm_items": tuple(mm_items)} | keys
    return SequenceGroup([Sequence(token_ids, params, **make) for _ in range(n)])


def commit(sched: Scheduler, step: SchedulerOutput, token_id: int = 5) -> list[SequenceGroup]:
    finished = sched.postprocess(step, SamplerOutput([token_id] * sum(chunk.samples for chunk in step.chunks)))
    sched.check()
    return finished


def run(sched: Scheduler) -> list[str]:
    """Step until nothing is left; request ids in the order in which they finished."""
    finished = []
    for _ in range(200):
        if sched.is_finished():
            return finished
        finished += [group.request_id for group in commit(sched, sched.schedule())]
    raise AssertionError("the requests never finish")


def chunks_of(step: SchedulerOutput) -> list[tuple[str, int, int, bool]]:
    return [(chunk.seq.request_id, chunk.start, chunk.end, chunk.samples) for chunk in step.chunks]


def test_a_prompt_then_decodes():
    sched = scheduler()
    sched.add(group(num_tokens=6, max_tokens=3))
    seen = []
    while not sched.is_finished():
        step = sched.schedule()
        seen += chunks_of(step)
        commit(sched, step)
    assert seen == [("r", 0, 6, True), ("r", 6, 7, True), ("r", 7, 8, True)]
    assert sched.schedule().chunks == []


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    sched = scheduler(max_num_batched_tokens=5)
    sched.add(group("a", num_tokens=4, first_token=50))
    commit(sched, sched.schedule())
    sched.add(group("b", num_tokens=10))
    step = sched.schedule()
    assert chunks_of(step) == [("a", 4, 5, True), ("b", 0, 4, False)]
    assert step.chunks == [*step.decodes, *step.prefills] and len(step.decodes) == 1 and step.num_tokens == 5
    commit(sched, step)
    assert chunks_of(sched.schedule()) == [("a", 5, 6, True), ("b", 4, 8, False)]


def test_one_at_a_time_runs_by_priority():
    sched = scheduler(max_num_seqs=1)
    for name, priority in (("low", 5), ("first", 0), ("high", -3), ("second", 0)):
        sched.add(group(name, priority=priority))
    assert run(sched) == ["high", "first", "second", "low"]


def test_a_running_request_is_not_interrupted_by_a_higher_priority():
    sched = scheduler(max_num_seqs=1)
    sched.add(group("running", priority=9))
    commit(sched, sched.schedule())
    sched.add(group("urgent", priority=-9))
    assert run(sched) == ["running", "urgent"] and sched.num_preemptions == 0


def test_preemption_is_visible_on_the_sequence():
    """Five blocks of four: two sequences of eight tokens need a third block each."""
    sched = scheduler(num_blocks=5)
    groups = [group("a", 8, 6), group("b", 8, 6, first_token=50)]
    for each in groups:
        sched.add(each)
    commit(sched, sched.schedule())
    first, second = (each.first_seq for each in groups)
    assert (second.status, second.num_preemptions) == (SequenceStatus.RUNNING, 0)
    step = sched.schedule()
    assert chunks_of(step) == [("a", 8, 9, True)]
    assert (second.status, second.num_preemptions) == (SequenceStatus.WAITING, 1)
    assert second.block_table == [] and second.num_computed_tokens == 0 and second.num_completion_tokens == 1
    assert (first.status, first.num_preemptions) == (SequenceStatus.RUNNING, 0)
    assert sched.waiting == [second] and sched.running == [first] and groups[1].has_begun
    commit(sched, step)
    assert run(sched) == ["a", "b"]
    assert sched.num_preemptions == second.num_preemptions >= 1
    assert second.finish_reason is FinishReason.LENGTH and second.num_completion_tokens == 6
    assert second.num_cached_tokens == 0, "what it found in the cache after its preemption does not count"


def test_the_lowest_priority_is_preempted():
    sched = scheduler(num_blocks=5)
    groups = [group("low", 8, 6, priority=1), group("high", 8, 6, first_token=50, priority=0)]
    for each in groups:
        sched.add(each)
    assert run(sched) == ["high", "low"]
    assert [each.first_seq.num_preemptions > 0 for each in groups] == [True, False]


def test_a_preempted_sequence_is_aborted_like_any_other():
    sched = scheduler()
    sched.add(group("a", 8))
    commit(sched, sched.schedule())
    sched.preempt_all()
    aborted = sched.abort_seq_group("a", FinishReason.ABORTED)
    assert aborted.first_seq.finish_reason is FinishReason.ABORTED and aborted.is_finished
    assert sched.is_finished() and not sched.waiting and sched.abort_seq_group("a", FinishReason.ABORTED) is None


def test_completions_of_one_prompt_share_its_blocks():
    sched = scheduler()
    sched.add(group(num_tokens=8, n=3))
    step = sched.schedule()
    assert chunks_of(step) == [("r", 0, 8, True)]
    commit(sched, step)
    step = sched.schedule()
    assert chunks_of(step) == [("r", 8, 9, True), ("r", 7, 8, True), ("r", 7, 8, True)]
    tables = [seq.block_table[0] for seq in sched.running]
    assert len(set(tables)) == 1
    assert [len(chunk.block_copies) for chunk in step.chunks] == [0, 1, 1], "the shared block is copied on write"
    commit(sched, step)
    assert run(sched) == ["r"]


def test_an_abort_ends_completions_that_have_not_begun():
    sched = scheduler()
    sched.add(group(n=3))
    ended = sched.abort_seq_group("r", FinishReason.ABORTED)
    assert [seq.finish_reason for seq in ended.seqs] == [FinishReason.ABORTED] * 3
    sched.check()


def test_an_abort_between_schedule_and_commit_is_ignored_by_the_commit():
    sched = scheduler()
    sched.add(group("a"))
    sched.add(group("b", first_token=50))
    step = sched.schedule()
    sched.abort_seq_group("a", FinishReason.ABORTED)
    commit(sched, step)
    assert run(sched) == ["b"]


def test_no_token_ends_the_request_with_an_error():
    sched = scheduler()
    sched.add(group("a"))
    finished = sched.postprocess(sched.schedule(), SamplerOutput([-1]))
    assert [each.request_id for each in finished] == ["a"] and "no token can follow" in finished[0].error
    assert finished[0].first_seq.finish_reason is FinishReason.ERROR


def test_items_are_encoded_once_and_held_until_their_last_chunk():
    sched = scheduler(max_num_batched_tokens=4)
    sched.add(group("a", 10, 2, mm_items=[image("A", 2, 6)]))
    step = sched.schedule()
    assert (
        chunks_of(step) == [("a", 0, 4, False)] and list(step.mm_items_to_encode) == [b"A"] and step.num_patches == 24
    )
    commit(sched, step)
    step = sched.schedule()
    assert step.mm_items_to_encode == {} and sched.encoder_cache.is_encoded(b"A")
    commit(sched, step)
    sched.encoder_cache.check(set())
    assert run(sched) == ["a"]


def test_a_step_encodes_a_limited_number_of_patches():
    sched = scheduler(max_vision_patches=30)
    sched.add(group("a", 12, 2, mm_items=[image("A", 1, 4), image("B", 6, 4)]))
    step = sched.schedule()
    assert chunks_of(step) == [("a", 0, 6, False)] and list(step.mm_items_to_encode) == [b"A"]
    commit(sched, step)
    assert list(sched.schedule().mm_items_to_encode) == [b"B"]


def test_an_item_without_room_in_the_encoder_cache_waits():
    sched = scheduler(rows=5)
    sched.add(group("a", 8, 2, mm_items=[image("A", 1, 5)]))
    sched.add(group("b", 8, 2, mm_items=[image("B", 1, 5)], first_token=50))
    step = sched.schedule()
    assert [chunk.seq.request_id for chunk in step.chunks] == ["a", "b"] and step.chunks[1].end == 1
    commit(sched, step)
    step = sched.schedule()
    assert step.freed_digests == (b"A",) and list(step.mm_items_to_encode) == [b"B"]
    assert [each.request_id for each in commit(sched, step)] == ["a"]
    assert run(sched) == ["b"]


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_later_requests_do_not_keep_a_large_item_from_the_encoder_cache(launches_ahead):
    sched = scheduler(rows=10)
    sched.add(group("first", 5, 1, mm_items=[image("A", 1, 4)]))
    sched.add(group("large", 16, 1, mm_items=[image("L", 4, 10)]))  # runs up to its image
    step, finished = sched.schedule(), []
    for i in range(8):
        sched.add(group(f"later{i}", 6, 1, mm_items=[image(f"S{i}", 1, 4)]))
        ahead = sched.schedule() if launches_ahead else None
        finished += [each.request_id for each in commit(sched, step)]
        step = ahead or sched.schedule()
    assert finished[:3] == ["first", "large", "later0"]


@pytest.mark.parametrize("budget", range(1, 13))
def test_temporal_patches_of_a_video_are_encoded_and_held_one_by_one(budget):
    clip = [image("first", 1, 2), image("second", 6, 2)]  # a block ends between them
    sched = scheduler(max_num_batched_tokens=budget, rows=2)
    rows, encoded = [], []
    for text in (30, 40):  # the second prompt finds the first block in the prefix cache
        token_ids = [10, PAD, PAD, 20, text, text, PAD, PAD, text, text]
        params = SamplingParams(max_tokens=2)
        sched.add(
            SequenceGroup([Sequence(token_ids, params, request_id=str(text), block_size=4, mm_items=tuple(clip))])
        )
        while not sched.is_finished():
            step = sched.schedule()
            encoded += step.mm_items_to_encode
            for chunk in step.chunks:
                rows += [
                    (i, *clip[i].embeds_in(chunk.start, chunk.end))
                    for i in chunk.seq.mm_items_in(chunk.start, chunk.end)
                ]
            commit(sched, step)  # checks that items are held by exactly the sequences inside them
    assert [(i, row) for i, first, last in rows for row in range(first, last)] == [
        (0, 0),
        (0, 1),
        *[(1, 0), (1, 1)] * 2,
    ]
    assert encoded == [b"first", b"second"], "the cache has room for one of them, which the second prompt needs"


def test_duplicate_items_of_one_step_are_encoded_once():
    sched = scheduler()
    for name in ("a", "b"):
        sched.add(group(name, 8, 2, mm_items=[image("A", 1, 5)], cache_salt=name))
    step = sched.schedule()
    assert len(step.chunks) == 2 and list(step.mm_items_to_encode) == [b"A"] and step.num_patches == 20


def test_a_step_behind_one_in_flight_computes_the_tokens_that_it_samples():
    sched = scheduler()
    for name in ("a", "b"):
        sched.add(group(name, max_tokens=2 if name == "a" else 5))
    step = sched.schedule()
    assert [seq.num_inflight_tokens for seq in sched.running] == [6, 6]
    ahead = sched.schedule()
    assert chunks_of(ahead) == [("a", 6, 7, True), ("b", 6, 7, True)]
    assert [seq.num_inflight_tokens for seq in sched.running] == [7, 7] and len(ahead.decodes) == 2
    commit(sched, step)
    assert [(seq.num_computed_tokens, seq.num_inflight_tokens) for seq in sched.running] == [(6, 1), (6, 1)]
    last = sched.schedule()
    assert chunks_of(last) == [("b", 7, 8, True)], "a has reached its length by then"
    assert [each.request_id for each in commit(sched, ahead)] == ["a"]
    commit(sched, last)


def test_a_prompt_goes_on_behind_its_chunk_in_flight():
    sched = scheduler(max_num_batched_tokens=4)
    sched.add(group(num_tokens=10, mm_items=[image("A", 2, 6)]))
    steps = [sched.schedule() for _ in range(4)]
    assert [chunks_of(step) for step in steps] == [
        [("r", 0, 4, False)],
        [("r", 4, 8, False)],
        [("r", 8, 10, True)],
        [("r", 10, 11, True)],
    ]
    assert [list(step.mm_items_to_encode) for step in steps] == [[b"A"], [], [], []]
    for step in steps:
        commit(sched, step)
    assert run(sched) == ["r"]


def test_a_request_starts_behind_a_step_in_flight():
    sched = scheduler()
    sched.add(group("a"))
    step = sched.schedule()
    sched.add(group("b", first_token=50))
    ahead = sched.schedule()
    assert chunks_of(ahead) == [("a", 6, 7, True), ("b", 0, 6, True)] and len(ahead.prefills) == 1
    commit(sched, step)
    commit(sched, ahead)
    assert run(sched) == ["a", "b"]


def test_nothing_is_scheduled_behind_the_last_token():
    sched = scheduler()
    sched.add(group(max_tokens=1))
    step = sched.schedule()
    assert sched.schedule().chunks == []
    assert [each.request_id for each in commit(sched, step)] == ["r"]


def test_what_a_preempted_sequence_had_in_flight_is_ignored_even_if_it_runs_again():
    sched = scheduler()
    sched.add(group(max_tokens=5))
    step = sched.schedule()
    seq = sched.running[0]
    sched.preempt(seq)
    again = sched.schedule()
    assert chunks_of(again) == [("r", 0, 6, True)] and seq.status is SequenceStatus.RUNNING
    commit(sched, step, token_id=77)
    assert seq.num_completion_tokens == 0 and seq.num_inflight_tokens == 6
    commit(sched, again)
    assert seq.completion_token_ids == [5]


def test_a_sequence_has_a_request_index_while_it_runs():
    sched = scheduler(max_num_seqs=2)
    for name in "abc":
        sched.add(group(name, max_tokens=1 if name == "a" else 3, first_token=10 * ord(name)))
    step = sched.schedule()
    first, second = (chunk.seq for chunk in step.chunks)
    assert {first.req_index, second.req_index} == {0, 1} and step.started == [first, second]
    req_index = first.req_index
    commit(sched, step)
    assert first.req_index is None
    step = sched.schedule()
    assert [seq.request_id for seq in step.started] == ["c"] and step.started[0].req_index == req_index
    commit(sched, step)


def test_the_limit_of_sequences_is_reduced_and_recovers():
    sched = scheduler(max_num_seqs=8)
    for name in "abcd":
        sched.add(group(name, max_tokens=100, first_token=10 * ord(name)))
    sched.schedule()
    sched.reduce_batch_size(4)
    assert sched.seq_limit == 2 and not sched.running and len(sched.waiting) == 4
    for _ in range(32):
        step = sched.schedule()
        assert len(step.chunks) == 2
        commit(sched, step)
    assert sched.seq_limit == 3


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_a_sequence_without_a_block_computes_again_once(launches_ahead):
    """The blocks of what it has computed are enough for the tokens that are known, but not for those in flight."""
    sched = scheduler(num_blocks=5, block_size=32, max_num_batched_tokens=512)
    sched.add(group("a", 3, 28, first_token=200, block_size=32))
    sched.add(group("b", 128, 12, block_size=32))
    step = sched.schedule()
    while not sched.is_finished():
        ahead = sched.schedule() if launches_ahead else None
        commit(sched, step)
        step = ahead if ahead and ahead.num_tokens else sched.schedule()
    assert sched.num_preemptions == 1


def test_bytes_of_media_that_have_not_begun():
    sched = scheduler(max_num_seqs=1)
    for name in ("a", "b"):
        sched.add(group(name, 8, 2, mm_items=[image(name, 1, 5)]))
    assert sched.num_waiting_bytes == 40
    commit(sched, sched.schedule())
    assert sched.num_waiting_bytes == 20


def test_a_prefix_hit_counts_as_cached_tokens():
    sched = scheduler()
    sched.add(group("a", 9, 1))
    run(sched)
    again = group("b", 9, 1)
    sched.add(again)
    assert chunks_of(sched.schedule()) == [("b", 8, 9, True)] and again.first_seq.num_cached_tokens == 8


@pytest.mark.parametrize("num_blocks", [3, 4, 5, 8, 30])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_every_request_finishes_however_short_blocks_and_budget(num_blocks, budget):
    sched = scheduler(num_blocks=num_blocks, rows=5, max_num_batched_tokens=budget)
    for i in range(5):
        sched.add(group(f"r{i}", 8, 4, n=1 + i % 2, mm_items=[image("AB"[i % 2], 1, 5)], priority=-i))
    assert sorted(run(sched)) == [f"r{i}" for i in range(5)]
    assert sched.block_manager.num_free_blocks == num_blocks
    sched.encoder_cache.check(set())
