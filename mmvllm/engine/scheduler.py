"""Who gets how many tokens this step; preemption; commit of sampled tokens.

There is no prefill phase and no decode phase. Each sequence has `num_computed_tokens` and `num_tokens`; a step hands
out tokens, oldest request first, so that the former catches up with the latter. A whole prompt, a chunk of one, the
rest after a prefix hit, recovery after a preemption and a decode are the same thing with other numbers. (The idea is
vLLM's, v1/core/sched/scheduler.py; chunked prefill is arXiv 2308.16369.)
"""

import time
from bisect import insort
from dataclasses import dataclass, field

from mmvllm.engine.block_manager import BlockManager
from mmvllm.engine.encoder_cache import EncoderCache
from mmvllm.engine.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus

RECOVERY_STEPS = 32  # after which one more sequence may run, where a step had run out of memory


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, end) of a sequence, computed in this step; `samples` if they reach its last token."""

    seq: Sequence
    start: int
    end: int
    samples: bool
    block_copies: list[tuple[int, int]]

    @property
    def decodes(self) -> bool:
        """Whether all there is to compute is the last token of an answer."""
        return self.samples and self.end - self.start == 1 and self.start >= self.seq.num_prompt_tokens


@dataclass(slots=True)
class Schedule:
    """One step: chunks to compute, and the pictures (sequence, index) to encode before."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    images_to_encode: dict[bytes, tuple[Sequence, int]] = field(default_factory=dict)  # by digest
    num_tokens: int = 0
    num_patches: int = 0
    rows: list[int] | None = None  # where each chunk's one token is among those that the step before samples


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A new token, or None where the logits allow none; `logprobs` and `logprob` where the request asked for them."""

    token_id: int | None
    logprob: float | None = None
    logprobs: dict[int, float] | None = None


class Scheduler:
    """Owns the state of every sequence; the block manager and the encoder cache do what it says."""

    def __init__(
        self,
        block_manager: BlockManager,
        encoder_cache: EncoderCache,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_vision_patches: int,
    ):
        self.block_manager = block_manager
        self.encoder_cache = encoder_cache
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_vision_patches = max_vision_patches
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting: list[Sequence] = []  # both lists are kept in order of service
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._halved_to, self._clean_steps = max_num_seqs, 0  # since a step last ran out of memory

    @property
    def seq_limit(self) -> int:
        """Sequences that may run at once: `max_num_seqs`, or fewer for a while after a step ran out of memory."""
        return min(self.max_num_seqs, self._halved_to + self._clean_steps // RECOVERY_STEPS)

    def add(self, group: SequenceGroup) -> None:
        """Queue a request. Its leader starts; the others wait until the prompt has been computed once."""
        self.groups[group.request_id] = group
        insort(self.waiting, group.leader)

    def is_finished(self) -> bool:
        return not self.groups

    def schedule(self) -> Schedule:
        """Hand out this step's tokens; never empty while a sequence waits or runs."""
        while True:
            preemptions = self.num_preemptions
            step = Schedule()
            self._schedule_running(step)
            if self.num_preemptions == preemptions:  # who was just preempted must not come straight back
                self._schedule_waiting(step)
            if step.chunks or not (self.running or self.waiting):
                return step
            # A lone sequence that preempted itself let go of what blocked the others. Nothing else may bring us here.
            if self.num_preemptions == preemptions:
                raise AssertionError(
                    f"nothing could be scheduled: {len(self.running)} running, {len(self.waiting)} waiting, "
                    f"{self.block_manager.num_free_blocks} of {self.block_manager.num_blocks} blocks free"
                )

    def schedule_ahead(self, running: Schedule) -> Schedule | None:
        """The step after one whose tokens nobody knows yet: each of its sequences computes the token that it samples.

        None where that might not be all there is to do: while a prompt is being computed, while a sequence waits that
        could start, or if blocks might run short. A sequence that reaches its length is left out. One that ends in
        another way, or is taken away, has computed in vain: `postprocess` ignores it.
        """
        alive = [(row, chunk) for row, chunk in enumerate(running.chunks) if chunk.seq.status is SequenceStatus.RUNNING]
        if len(alive) < len(self.running) or not all(chunk.samples for chunk in running.chunks):
            return None
        chunks = [(row, chunk) for row, chunk in alive if not self._is_full(chunk.seq, chunk.end + 1)]
        one_could_start = self.waiting and len(chunks) < self.seq_limit
        # A sequence needs one new block, or writes on into one that the running step has made its own.
        if not chunks or one_could_start or len(chunks) > self.block_manager.num_free_blocks:
            return None
        ahead = Schedule(num_tokens=len(chunks), rows=[row for row, _ in chunks])
        for _, chunk in chunks:
            seq = chunk.seq
            copies = self.block_manager.allocate(seq, chunk.end + 1 - seq.num_computed_tokens)
            ahead.chunks.append(ScheduledChunk(seq, chunk.end, chunk.end + 1, True, copies))
        return ahead

    def _schedule_running(self, step: Schedule) -> None:
        for seq in list(self.running):
            if seq.status is not SequenceStatus.RUNNING:  # preempted for the sake of one before it
                continue
            while self._schedule_seq(step, seq) is None:
                assert len(self.running) > 1, f"sequence {seq.seq_id} needs more blocks than there are"
                victim = self.running[-1]  # the last in order, so never one that this step has scheduled
                self.preempt(victim)
                if victim is seq:
                    break

    def _schedule_waiting(self, step: Schedule) -> None:
        while self.waiting and len(self.running) < self.seq_limit and step.num_tokens < self.max_num_batched_tokens:
            seq = self.waiting[0]
            seq.num_computed_tokens = self._attach_blocks(seq)
            if not self._schedule_seq(step, seq):
                self._release(seq)  # no room yet; later requests do not overtake
                return
            if seq.finish_reason is None:  # else it has been preempted
                seq.num_cached_tokens = step.chunks[-1].start // seq.block_size * seq.block_size
            del self.waiting[0]
            insort(self.running, seq)
            seq.status, seq.finish_reason = SequenceStatus.RUNNING, None

    def _attach_blocks(self, seq: Sequence) -> int:
        """Start a waiting sequence from what is computed already: its group's prompt, or a cached prefix."""
        leader = self.groups[seq.request_id].leader
        if seq is not leader and leader.num_computed_tokens >= leader.num_prompt_tokens:
            return self.block_manager.fork(leader, seq)
        return self.block_manager.attach_prefix(seq)

    def _schedule_seq(self, step: Schedule, seq: Sequence) -> int | None:
        """Schedule as many of a sequence's tokens as the budgets allow; that number, or None if blocks are short."""
        start = seq.num_computed_tokens
        end = min(seq.num_tokens, start + self.max_num_batched_tokens - step.num_tokens)
        end, new_images = self._acquire_images(step, seq, start, end)
        if end <= start:
            return 0
        copies = self.block_manager.allocate(seq, end - start)
        if copies is None:
            return None
        step.chunks.append(ScheduledChunk(seq, start, end, end == seq.num_tokens, copies))
        step.num_tokens += end - start
        step.num_patches += sum(len(seq.pixel_values[i]) for i in new_images)
        step.images_to_encode |= {seq.vision.image_digests[i]: (seq, i) for i in new_images}
        return end - start

    def _acquire_images(self, step: Schedule, seq: Sequence, start: int, end: int) -> tuple[int, list[int]]:
        """Hold the pictures that tokens [start, end) touch.

        Returns the end, moved before the first picture that has no room, and the pictures that are to be encoded.
        A step encodes at most `max_vision_patches`, except that one larger picture may go alone.
        """
        new_images: list[int] = []
        num_patches = step.num_patches
        for i in seq.vision.touching(start, end):
            digest, (offset, length) = seq.vision.image_digests[i], seq.vision_placeholders[i]
            is_new = digest not in step.images_to_encode and not self.encoder_cache.is_encoded(digest)
            if is_new and digest not in {seq.vision.image_digests[j] for j in new_images}:
                if num_patches and num_patches + len(seq.pixel_values[i]) > self.max_vision_patches:
                    return max(start, offset), new_images
                num_patches += len(seq.pixel_values[i])
                new_images.append(i)
            if not self.encoder_cache.acquire(digest, length, (seq.seq_id, i)):
                return max(start, offset), [j for j in new_images if j != i]
        return end, new_images

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks and pictures; it waits, and computes again what is no longer cached."""
        self.num_preemptions += 1
        self.running.remove(seq)
        self._release(seq)
        seq.status, seq.finish_reason = SequenceStatus.WAITING, FinishReason.PREEMPTED
        insort(self.waiting, seq)

    def preempt_all(self) -> None:
        """Go back to a state in which nothing has been scheduled; all running sequences compute again."""
        while self.running:
            self.preempt(self.running[-1])

    def halve(self, num_seqs: int) -> None:
        """Take back a step of so many sequences, two or more, and let no more than half as many run at once."""
        assert num_seqs > 1, "half of one sequence is none"
        self.preempt_all()
        self._halved_to, self._clean_steps = num_seqs // 2, 0

    def postprocess(self, step: Schedule, sampled: list[SampledToken]) -> list[SequenceGroup]:
        """Commit a step that has run: tokens computed, tokens sampled; return the requests that finished.

        `sampled` has one token per chunk with `samples`, in order.
        """
        # A prompt that is preempted may begin anew: if its steps counted too, it could do so for ever.
        self._clean_steps += bool(sampled)
        tokens = iter(sampled)
        for chunk in step.chunks:
            seq = chunk.seq
            token = next(tokens) if chunk.samples else None
            # Ended, with another answer of its group or by an abort, or preempted since the step was launched.
            if seq.status is not SequenceStatus.RUNNING:
                continue
            seq.num_computed_tokens = chunk.end
            self.block_manager.commit(seq)
            for i in seq.vision.touching(chunk.start, chunk.end):
                if sum(seq.vision.vision_placeholders[i]) <= chunk.end:
                    self.encoder_cache.release(seq.vision.image_digests[i], (seq.seq_id, i))
            if token is not None:
                self._append(seq, token)
        return self._collect({chunk.seq.request_id for chunk in step.chunks})

    def _append(self, seq: Sequence, token: SampledToken) -> None:
        group = self.groups[seq.request_id]
        if token.token_id is None:
            error = "no token can follow: the model's logits are not numbers, or every token is forbidden"
            self._end(group, FinishReason.ERROR, error)
            return
        seq.append_token(token.token_id)
        if seq.first_token_time is None:
            seq.first_token_time = time.time()
        if token.logprobs is not None:
            seq.logprobs.append(token.logprobs)
            seq.cumulative_logprob += token.logprob
        if seq is group.leader and not group.children_started:
            group.children_started = True
            for child in group.seqs[1:]:
                insort(self.waiting, child)
        if reason := self._finish_reason(seq):
            self._finish(seq, reason)

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        params, token_id = seq.sampling_params, seq.token_ids[-1]
        stop_string = seq.answer_text is not None and seq.answer_text.append(token_id)
        if seq.num_completion_tokens >= params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return FinishReason.EOS
            if token_id in params.stop_token_ids or stop_string:
                return FinishReason.STOP
        return FinishReason.LENGTH if self._is_full(seq, seq.num_tokens) else None

    def _is_full(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether a sequence ends when it has so many tokens, prompt and answer."""
        max_tokens = seq.num_prompt_tokens + seq.sampling_params.max_tokens
        return num_tokens >= min(max_tokens, self.max_model_len)

    def abort_seq_group(self, request_id: str, reason: FinishReason, error: str | None = None) -> SequenceGroup | None:
        """End a request at any moment; None if it is not here."""
        group = self.groups.get(request_id)
        if group is not None:
            self._end(group, reason, error)
            del self.groups[request_id]
        return group

    def check(self) -> None:
        """Assert that blocks and pictures are held by exactly the running sequences."""
        assert self.running == sorted(self.running) and self.waiting == sorted(self.waiting)
        assert not any(seq.block_table for seq in self.waiting)
        self.block_manager.check(self.running)
        users = set()
        for seq in self.running:
            for i, (offset, length) in enumerate(seq.vision.vision_placeholders):
                if offset < seq.num_computed_tokens < offset + length:
                    users.add((seq.seq_id, i))
        self.encoder_cache.check(users)

    def _collect(self, request_ids: set[str]) -> list[SequenceGroup]:
        groups = [self.groups[request_id] for request_id in request_ids if request_id in self.groups]
        finished = [group for group in groups if group.is_finished]
        for group in finished:
            del self.groups[group.request_id]
        return sorted(finished, key=lambda group: group.leader)

    def _end(self, group: SequenceGroup, reason: FinishReason, error: str | None) -> None:
        group.error = error
        for seq in group.seqs:
            if not seq.is_finished:
                self._finish(seq, reason)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        queue = self.running if seq.status is SequenceStatus.RUNNING else self.waiting
        if seq in queue:  # an answer whose group's prompt is not computed yet is in neither
            queue.remove(seq)
        self._release(seq)
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason

    def _release(self, seq: Sequence) -> None:
        self.block_manager.free(seq)
        for i, digest in enumerate(seq.vision.image_digests):
            self.encoder_cache.release(digest, (seq.seq_id, i))
        seq.num_computed_tokens = 0
