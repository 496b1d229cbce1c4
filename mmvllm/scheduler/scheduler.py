"""How many tokens each sequence computes in a step; preemption; commit of sampled tokens.

There is no prefill phase and no decode phase. Each sequence has `num_computed_tokens` and `num_tokens`; a step hands
out tokens, oldest request first, so that the former catches up with the latter. A whole prompt, a chunk of one, the
rest after a prefix hit, recovery after a preemption and a decode are the same thing with other numbers. (The idea is
vLLM's, v1/core/sched/scheduler.py; chunked prefill is arXiv 2308.16369.)

A step may be scheduled while the one before it is in flight: launched, and its tokens not seen. `num_inflight_tokens`
of a sequence is what steps in flight compute of it, so it goes on from there, with the token that is being sampled.
Where that token turns out to end the sequence, the commit ignores what was computed after it. A sequence whose next
token depends on the text so far (`Sequence.waits_for_tokens`) is scheduled again when its token has been seen.

Beams wait for each other: one that has its candidates is neither scheduled nor, once it is preempted, in the queue
until all beams of its search have theirs (`Beams`).
"""

import time
from bisect import insort
from collections.abc import Callable
from enum import Enum, auto

from mmvllm.errors import RequestError
from mmvllm.inputs import MultiModalItem
from mmvllm.lora.adapter_slots import AdapterSlots
from mmvllm.scheduler.beam_search import Candidate
from mmvllm.scheduler.block_manager import BlockManager
from mmvllm.scheduler.encoder_cache import EncoderCache
from mmvllm.scheduler.output import ScheduledChunk, SchedulerOutput
from mmvllm.scheduler.sampler_output import SamplerOutput, TokenLogprobs
from mmvllm.scheduler.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus

_NO_COPIES: list[tuple[int, int]] = []
_NO_TOKEN = "no token can follow: the model's logits are not numbers, or every token is forbidden"
RECOVERY_STEPS = 32  # after this many, one more sequence may run, where a step had run out of memory


class _ScheduleResult(Enum):
    """What became of a sequence in a step."""

    SCHEDULED = auto()
    COMPLETE = auto()  # nothing follows the token in flight: it is the last by length, or must be seen first
    OUT_OF_BUDGET = auto()  # of tokens or patches
    STALLED = auto()  # for lack of room in the encoder cache, or of blocks with a token in flight
    OUT_OF_BLOCKS = auto()


class Scheduler:
    """Writes the state of every sequence, and calls the block manager and the encoder cache.

    Args:
        finish_reason: (sequence with a new token) -> why it ends with this token, or None.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens computed in one step.
        max_vision_patches: patches encoded in one step; a larger item is encoded alone.
        max_loras: slots for adapters.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        encoder_cache: EncoderCache,
        finish_reason: Callable[[Sequence], FinishReason | None],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_vision_patches: int,
        max_loras: int = 0,
    ):
        self.block_manager = block_manager
        self.encoder_cache = encoder_cache
        self._finish_reason = finish_reason
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_vision_patches = max_vision_patches
        self.adapter_slots = AdapterSlots(max_loras)
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting: list[Sequence] = []  # both lists are kept in order of service
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_req_indices = list(reversed(range(max_num_seqs)))
        self._uncollected: dict[str, None] = {}  # requests of which a sequence has ended
        self._reduced_to, self._clean_steps = max_num_seqs, 0  # since a step last ran out of memory

    @property
    def seq_limit(self) -> int:
        """Sequences that may run at once: `max_num_seqs`, or fewer for a while after a step ran out of memory."""
        return min(self.max_num_seqs, self._reduced_to + self._clean_steps // RECOVERY_STEPS)

    def add(self, group: SequenceGroup) -> None:
        """Queue a request. Its first sequence starts; the others wait until the prompt has been computed once."""
        self.groups[group.request_id] = group
        insort(self.waiting, group.first_seq)

    @property
    def num_waiting_bytes(self) -> int:
        """Host memory of the media of requests that have not begun."""
        return sum(group.num_bytes for group in self.groups.values() if not group.has_begun)

    def is_finished(self) -> bool:
        return not self.groups

    def schedule(self) -> SchedulerOutput:
        """Hand out the next step's tokens.

        Empty if nothing waits or runs, or if all that runs ends with the step in flight.
        """
        while True:
            step = SchedulerOutput()
            seen = self._schedule_running(step)
            preempted = _ScheduleResult.OUT_OF_BLOCKS in seen
            # A sequence that was just preempted must not run again at once. One that runs and has no room for an item
            # would never get it, if others took what is given back: with steps ahead, some items are always in flight.
            if not preempted and _ScheduleResult.STALLED not in seen:
                self._schedule_waiting(step)
            if step.num_tokens:
                step.freed_digests = self.encoder_cache.take_freed()
                step.new_adapters = self.adapter_slots.take_new()
                return step
            # A lone sequence that preempted itself freed what kept the others from running, as does a beam that waits
            # for others. No other case goes on.
            if not preempted and not self._preempt_held():
                self._check_progress()
                return step

    def _is_held(self, seq: Sequence) -> bool:
        """Whether a running sequence is a beam that waits for other beams, and needs nothing until then."""
        return seq.is_beam and self.groups[seq.request_id].beams.holds(seq)

    def _preempt_held(self) -> bool:
        """Make room for the sequences that wait, where nothing else will."""
        held = next(filter(self._is_held, reversed(self.running)), None)
        if held is None or not self.waiting or self._is_in_flight:
            return False
        self.preempt(held)
        return True

    @property
    def _is_in_flight(self) -> bool:
        return any(seq.num_inflight_tokens for seq in self.running)

    def _check_progress(self) -> None:
        assert self._is_in_flight or not (self.running or self.waiting), (
            f"nothing could be scheduled: {len(self.running)} running, {len(self.waiting)} waiting, "
            f"{self.block_manager.num_free_blocks} of {self.block_manager.num_blocks} blocks free"
        )

    def _schedule_running(self, step: SchedulerOutput) -> set[_ScheduleResult]:
        """Schedule running sequences in order; preempt others where one is out of blocks. What became of them."""
        seen = set()
        for seq in list(self.running):
            if seq.status is not SequenceStatus.RUNNING:  # preempted in favour of one before it
                continue
            if seq.is_decoding and self._schedule_decode(step, seq):
                continue
            while (result := self._schedule_seq(step, seq)) is _ScheduleResult.OUT_OF_BLOCKS:
                assert len(self.running) > 1, f"sequence {seq.seq_id} needs more blocks than there are"
                victim = self.running[-1]  # the last in order, so never one that this step has scheduled
                if victim is seq:
                    victim = next(filter(self._is_held, reversed(self.running)), seq)
                if victim is seq and seq.is_decoding and seq.num_inflight_tokens:
                    # Without its token in flight it would need no more blocks than it gives back: it would start again
                    # at once, compute all again, and come here again.
                    result = _ScheduleResult.STALLED
                    break
                seen.add(result)
                self.preempt(victim)
                if victim is seq:
                    break
            if seq.is_beam and result is _ScheduleResult.SCHEDULED:
                step.started.append(seq)
            seen.add(result)
        return seen

    def _schedule_decode(self, step: SchedulerOutput, seq: Sequence) -> bool:
        """Schedule one token of a sequence that decodes, unless it needs a block: most sequences in most steps."""
        start = seq.num_computed_tokens + seq.num_inflight_tokens
        # Its last block is its own: a completion that shares it, forked from it, has copied it in the step it started.
        if start >= len(seq.block_table) * seq.block_size or step.num_tokens >= self.max_num_batched_tokens:
            return False
        if self._may_follow(seq, start):
            seq.num_inflight_tokens += 1
            step.num_tokens += 1
            step.decodes.append(ScheduledChunk(seq, start, start + 1, True, seq.num_preemptions, _NO_COPIES))
        return True

    @staticmethod
    def _may_follow(seq: Sequence, start: int) -> bool:
        """Whether token `start` is known, or in flight and to be computed before it is seen."""
        return start < seq.num_tokens or (start + 1 < seq.max_num_tokens and not seq.waits_for_tokens)

    def _schedule_waiting(self, step: SchedulerOutput) -> None:
        while self.waiting and len(self.running) < self.seq_limit and step.num_tokens < self.max_num_batched_tokens:
            seq = self.waiting[0]
            if not self._acquire_slot(seq):
                return  # one of those that run ends first; later requests do not overtake
            seq.num_computed_tokens = self._attach_blocks(seq)
            if self._schedule_seq(step, seq) is not _ScheduleResult.SCHEDULED:
                self._release(seq)  # no room yet; later requests do not overtake
                return
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = time.time()
                if seq is self.groups[seq.request_id].first_seq:  # others of the group have the same images
                    step.num_new_images += len(seq.mm_items)
            if seq.num_preemptions == 0 and seq.num_completion_tokens == 0:
                seq.num_cached_tokens = step.prefills[-1].start // seq.block_size * seq.block_size
            del self.waiting[0]
            insort(self.running, seq)
            seq.status, seq.finish_reason = SequenceStatus.RUNNING, None
            seq.req_index = self._free_req_indices.pop()
            step.started.append(seq)

    def _acquire_slot(self, seq: Sequence) -> bool:
        """Hold a slot for the sequence's adapter, if it has one; False if others hold all of them."""
        if seq.adapter is not None:
            seq.adapter_slot = self.adapter_slots.acquire(seq.adapter, seq.seq_id)
        return seq.adapter is None or seq.adapter_slot is not None

    def _attach_blocks(self, seq: Sequence) -> int:
        """Start a waiting sequence from what is computed already: its group's prompt, a beam, or a cached prefix."""
        if seq.is_beam:
            return self._attach_beam(seq)
        first = self.groups[seq.request_id].first_seq
        if seq is not first and first.num_computed_tokens >= first.num_prompt_tokens:
            return self.block_manager.fork(first, seq, first.num_prompt_tokens - 1)
        return self.block_manager.attach_prefix(seq)

    def _attach_beam(self, seq: Sequence) -> int:
        cached, parent = self.block_manager.attach_prefix(seq), seq.forked_from
        computed = 0 if parent is None else min(parent.num_computed_tokens, seq.num_tokens - 1)
        if computed <= cached:
            return cached
        self.block_manager.free(seq)
        return self.block_manager.fork(parent, seq, computed)

    def _schedule_seq(self, step: SchedulerOutput, seq: Sequence) -> _ScheduleResult:
        """Schedule as many of a sequence's tokens as the budgets allow."""
        start = seq.num_computed_tokens + seq.num_inflight_tokens
        known = max(seq.num_tokens, start + 1)  # with the token in flight, if all before it are computed
        if not self._may_follow(seq, start):
            return _ScheduleResult.COMPLETE
        end = min(known, start + self.max_num_batched_tokens - step.num_tokens)
        end, new_mm_items = self._acquire_items(step, seq, start, end)
        if end <= start:  # patches do not keep the first item of a step from being encoded
            return _ScheduleResult.OUT_OF_BUDGET if step.num_patches else _ScheduleResult.STALLED
        copies = self.block_manager.allocate(seq, end - start)
        if copies is None:
            return _ScheduleResult.OUT_OF_BLOCKS
        samples = end == known and end < seq.max_num_tokens  # else nothing is generated: the prompt is what is wanted
        prompt_tokens = None if seq.prompt_outputs is None else seq.prompt_outputs.tokens_in(start, end)
        chunk = ScheduledChunk(seq, start, end, samples, seq.num_preemptions, copies, prompt_tokens)
        (step.decodes if seq.is_decoding else step.prefills).append(chunk)
        seq.num_inflight_tokens += end - start
        seq.is_decoding = chunk.samples
        step.num_tokens += end - start
        step.num_patches += sum(item.num_patches for item in new_mm_items.values())
        step.mm_items_to_encode |= new_mm_items
        if seq.adapter is not None and seq.adapter.adapts_vision:
            step.item_slots |= dict.fromkeys(new_mm_items, seq.adapter_slot)
        self.encoder_cache.mark_encoded(new_mm_items)  # before any later step uses their embeddings
        return _ScheduleResult.SCHEDULED

    def _acquire_items(
        self, step: SchedulerOutput, seq: Sequence, start: int, end: int
    ) -> tuple[int, dict[bytes, MultiModalItem]]:
        """Hold the items that tokens [start, end) touch.

        Returns the end, moved before the first item that has no room, and the items that are to be encoded.
        A step encodes at most `max_vision_patches`, except that one larger item may be encoded alone.
        """
        new_mm_items: dict[bytes, MultiModalItem] = {}
        num_patches = step.num_patches
        for i in seq.mm_items_in(start, end):
            item = seq.mm_items[i]
            is_new = item.digest not in new_mm_items and not self.encoder_cache.is_encoded(item.digest)
            if is_new and num_patches and num_patches + item.num_patches > self.max_vision_patches:
                return max(start, item.offset), new_mm_items
            if not self.encoder_cache.acquire(item.digest, item.num_tokens, (seq.seq_id, i)):
                return max(start, item.offset), new_mm_items
            if is_new:
                num_patches += item.num_patches
                new_mm_items[item.digest] = item
        return end, new_mm_items

    def preempt(self, seq: Sequence) -> None:
        """Free a running sequence's blocks and items; it waits, and computes again what is no longer cached."""
        self.num_preemptions += 1
        seq.num_preemptions += 1
        self._withdraw(seq)
        seq.finish_reason = FinishReason.PREEMPTED
        if not self._is_held(seq):
            insort(self.waiting, seq)

    def _withdraw(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.status = SequenceStatus.WAITING

    def preempt_all(self) -> None:
        """Undo all that has been scheduled; all running sequences compute again."""
        while self.running:
            self.preempt(self.running[-1])

    def preempt_in_flight(self) -> None:
        """Undo the steps in flight; their sequences compute again."""
        for seq in reversed([seq for seq in self.running if seq.num_inflight_tokens]):
            self.preempt(seq)

    def reduce_batch_size(self, num_seqs: int) -> None:
        """Undo a step of `num_seqs` > 1 sequences that ran out of memory; at most half of them run at once then."""
        assert num_seqs > 1, "half of one sequence is none"
        self.preempt_all()
        self._reduced_to, self._clean_steps = num_seqs // 2, 0

    def postprocess(self, step: SchedulerOutput, sampled: SamplerOutput) -> list[SequenceGroup]:
        """Commit a step that has run: tokens computed, tokens sampled; return the requests that finished.

        `sampled` has one token per chunk with `samples`, in the order of `step.chunks`.
        """
        tokens, at = sampled.token_ids, 0
        # Steps without a sampled token do not count: a long prompt could be preempted and begin again endlessly.
        self._clean_steps += bool(tokens)
        if sampled.prompt_outputs:
            self._commit_prompt_outputs(step, sampled)
        caches_prefixes, block_size = self.block_manager.enable_prefix_caching, self.block_manager.block_size
        for chunk in step.chunks:
            seq = chunk.seq
            # Not one that has ended since the step was launched, with another completion of its group for example.
            if chunk.is_current:
                seq.num_inflight_tokens -= chunk.end - chunk.start
                seq.num_computed_tokens = chunk.end
                if caches_prefixes and chunk.end >= (len(seq.prefix_ids) + 1) * block_size:
                    self.block_manager.commit(seq)
                if chunk.start < seq.mm_end:
                    self._release_items(seq, chunk.start, chunk.end)
                if chunk.samples and seq.is_beam:
                    self._hold(seq, sampled.candidates[at])
                elif chunk.samples:
                    self._append(seq, tokens[at], sampled.logprobs.get(at), sampled.errors.get(at))
                elif chunk.end >= seq.max_num_tokens:
                    self._start_children(seq)
                    self._finish(seq, FinishReason.LENGTH)
            at += chunk.samples
        return self._collect()

    def _commit_prompt_outputs(self, step: SchedulerOutput, sampled: SamplerOutput) -> None:
        with_logprobs, pooled = step.prompt_output_chunks
        for chunk, found in zip(with_logprobs + pooled, sampled.prompt_outputs, strict=True):
            if chunk.is_current and not chunk.seq.prompt_outputs.commit(
                chunk.prompt_tokens, found, chunk.seq.token_ids
            ):
                error = "the model's hidden states or logits are not numbers"
                self._end(self.groups[chunk.seq.request_id], FinishReason.ERROR, error)

    def _release_items(self, seq: Sequence, start: int, end: int) -> None:
        """End the hold of the items that tokens [start, end) have reached the end of."""
        for i in seq.mm_items_in(start, end):
            if seq.mm_items[i].end <= end:
                self.encoder_cache.release(seq.mm_items[i].digest, (seq.seq_id, i))

    def _append(self, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None, error: RequestError | None) -> None:
        if token_id < 0:
            self._end(self.groups[seq.request_id], FinishReason.ERROR, error or _NO_TOKEN)
            return
        seq.token_ids.append(token_id)
        if seq.first_token_time is None:
            seq.first_token_time = time.time()
            self._start_children(seq)
        if logprobs is not None:
            seq.logprobs.append(logprobs.logprobs)
            seq.cumulative_logprob += logprobs.logprob
        if reason := self._finish_reason(seq):
            self._finish(seq, reason)

    def _hold(self, seq: Sequence, candidates: list[Candidate]) -> None:
        """A beam has its candidates; the search goes on once all beams have theirs."""
        group = self.groups[seq.request_id]
        if seq.first_token_time is None:
            seq.first_token_time = time.time()
        if not candidates:
            self._end(group, FinishReason.ERROR, _NO_TOKEN)
        elif group.beams.hold(seq, candidates):
            self._advance(group)

    def _advance(self, group: SequenceGroup) -> None:
        """Continue with the next beams; a beam without blocks is forked from another one."""
        staying, moved = group.beams.advance()
        if group.beams.search.is_done:
            self._end(group, FinishReason.LENGTH, None)  # each hypothesis has its own reason
            return
        for seq in group.seqs:
            if seq.status is SequenceStatus.RUNNING and seq not in staying:
                self._withdraw(seq)
        for seq in [*staying, *moved]:
            seq.is_decoding = False  # the device has not the token that follows
            if seq.status is SequenceStatus.WAITING:
                insort(self.waiting, seq)

    def _start_children(self, seq: Sequence) -> None:
        """With its first token a group's prompt has been computed; the other completions wait for their turn."""
        group = self.groups[seq.request_id]
        if seq is group.first_seq:
            for child in group.seqs[1:]:
                insort(self.waiting, child)

    def abort_seq_group(self, request_id: str, reason: FinishReason, error: str | None = None) -> SequenceGroup | None:
        """End a request at any moment; None if it is unknown."""
        group = self.groups.get(request_id)
        if group is not None:
            self._end(group, reason, error)
            del self.groups[request_id]
        return group

    def check(self) -> None:
        """Assert that blocks and items are held by exactly the running sequences."""
        assert self.running == sorted(self.running) and self.waiting == sorted(self.waiting)
        assert not any(seq.block_table or seq.num_inflight_tokens for seq in self.waiting)
        used = [seq.req_index for seq in self.running]
        assert sorted([*used, *self._free_req_indices]) == list(range(self.max_num_seqs)), (
            f"request indices in use: {used}"
        )
        self.block_manager.check(self.running)
        self.adapter_slots.check({seq.seq_id: seq.adapter_slot for seq in self.running if seq.adapter is not None})
        users = set()
        for seq in self.running:
            end = seq.num_computed_tokens + seq.num_inflight_tokens
            for i, item in enumerate(seq.mm_items):
                if item.offset < end and seq.num_computed_tokens < item.end:
                    users.add((seq.seq_id, i))
        self.encoder_cache.check(users)

    def _collect(self) -> list[SequenceGroup]:
        groups = [self.groups[request_id] for request_id in self._uncollected if request_id in self.groups]
        finished = [group for group in groups if group.is_finished]
        self._uncollected.clear()
        for group in finished:
            del self.groups[group.request_id]
        return sorted(finished, key=lambda group: group.first_seq)

    def _end(self, group: SequenceGroup, reason: FinishReason, error: str | RequestError | None) -> None:
        group.error = error
        for seq in group.seqs:
            if not seq.is_finished:
                self._finish(seq, reason)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        queue = self.running if seq.status is SequenceStatus.RUNNING else self.waiting
        if seq in queue:  # a completion whose group's prompt is not computed yet is in neither
            queue.remove(seq)
        self._release(seq)
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason
        self._uncollected[seq.request_id] = None

    def _release(self, seq: Sequence) -> None:
        self.block_manager.free(seq)
        for i, item in enumerate(seq.mm_items):
            self.encoder_cache.release(item.digest, (seq.seq_id, i))
        seq.num_computed_tokens = seq.num_inflight_tokens = 0
        seq.is_decoding = False
        if seq.adapter_slot is not None:
            self.adapter_slots.release(seq.adapter, seq.seq_id)
            seq.adapter_slot = None
        if seq.req_index is not None:
            self._free_req_indices.append(seq.req_index)
            seq.req_index = None
