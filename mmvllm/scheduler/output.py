"""One step of the engine, as the scheduler decided it."""

from dataclasses import dataclass, field

from mmvllm.inputs import MultiModalItem
from mmvllm.lora.adapters import Adapter
from mmvllm.scheduler.prompt_logprobs import PromptLogprobs
from mmvllm.scheduler.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class ScheduledChunk:
    """Tokens [start, end) of a sequence, computed in this step.

    Args:
        samples: whether they reach its last token, so that the next one is sampled.
        num_preemptions: of the sequence, when the chunk was scheduled.
        prompt_tokens: tokens whose hidden states `seq.prompt_outputs` needs.
    """

    seq: Sequence
    start: int
    end: int
    samples: bool
    num_preemptions: int
    block_copies: list[tuple[int, int]]  # (source, destination) blocks, copied before anything is written
    prompt_tokens: range | None = None

    @property
    def is_current(self) -> bool:
        """Whether the sequence has run on since then: not if it has ended, or was preempted."""
        seq = self.seq
        return seq.status is SequenceStatus.RUNNING and seq.num_preemptions == self.num_preemptions


@dataclass(slots=True)
class SchedulerOutput:
    """Items to encode, then chunks to compute."""

    decodes: list[ScheduledChunk] = field(default_factory=list)  # one token each, sampled before: the device has it
    prefills: list[ScheduledChunk] = field(default_factory=list)  # prompts, and what is computed again
    mm_items_to_encode: dict[bytes, MultiModalItem] = field(default_factory=dict)  # by digest
    item_slots: dict[bytes, int] = field(default_factory=dict)  # by digest, slots of adapters that change embeddings
    new_adapters: tuple[tuple[int, Adapter], ...] = ()  # (slot, adapter) to write first
    freed_digests: tuple[bytes, ...] = ()  # items that the encoder cache has dropped
    # Sequences whose device state is written: newly running ones, and beams, whose tokens may have changed.
    started: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    num_patches: int = 0
    num_new_images: int = 0  # of requests that begin in this step, and temporal patches of their videos

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """All chunks, in the order in which they are packed."""
        return self.decodes + self.prefills

    def encoded_sequences(self) -> list[Sequence]:
        """The sequences whose items are encoded in this step."""
        return [
            chunk.seq
            for chunk in self.prefills
            if any(
                chunk.seq.mm_items[i].digest in self.mm_items_to_encode
                for i in chunk.seq.mm_items_in(chunk.start, chunk.end)
            )
        ]

    @property
    def prompt_output_chunks(self) -> tuple[list[ScheduledChunk], list[ScheduledChunk]]:
        """The chunks with prompt log-probabilities, and the chunks whose hidden states are pooled."""
        chunks = [chunk for chunk in self.prefills if chunk.prompt_tokens is not None]
        with_logprobs = [chunk for chunk in chunks if isinstance(chunk.seq.prompt_outputs, PromptLogprobs)]
        return with_logprobs, [chunk for chunk in chunks if not isinstance(chunk.seq.prompt_outputs, PromptLogprobs)]
