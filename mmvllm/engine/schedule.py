"""One step of the engine, as the scheduler decided it."""

from dataclasses import dataclass, field

from mmvllm.engine.sequence import Sequence, SequenceStatus
from mmvllm.inputs import MediaItem


@dataclass(slots=True)
class ScheduledChunk:
    """Tokens [start, end) of a sequence, computed in this step.

    Args:
        samples: whether they reach its last token, so that the next one is sampled.
        num_preemptions: of the sequence, when the chunk was scheduled.
    """

    seq: Sequence
    start: int
    end: int
    samples: bool
    num_preemptions: int
    block_copies: list[tuple[int, int]]  # (source, destination) blocks, copied before anything is written

    @property
    def is_current(self) -> bool:
        """Whether the sequence has run on since then: not if it has ended, or was preempted."""
        seq = self.seq
        return seq.status is SequenceStatus.RUNNING and seq.num_preemptions == self.num_preemptions


@dataclass(slots=True)
class Schedule:
    """Items to encode, then chunks to compute."""

    decodes: list[ScheduledChunk] = field(default_factory=list)  # one token each, sampled before: the device has it
    prefills: list[ScheduledChunk] = field(default_factory=list)  # prompts, and what is computed again
    items_to_encode: dict[bytes, MediaItem] = field(default_factory=dict)  # by digest
    freed_digests: tuple[bytes, ...] = ()  # items whose rows are no longer cached
    started: list[Sequence] = field(default_factory=list)  # the sequences that run from this step on
    num_tokens: int = 0
    num_patches: int = 0

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """All chunks, in the order in which they are packed."""
        return self.decodes + self.prefills

    def encoded_sequences(self) -> list[Sequence]:
        """Those that need items which this step encodes."""
        return [
            chunk.seq
            for chunk in self.prefills
            if any(
                chunk.seq.items[i].digest in self.items_to_encode for i in chunk.seq.items_in(chunk.start, chunk.end)
            )
        ]
