"""One request in flight: a `Sequence` per completion, a `SequenceGroup` per request."""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from mmvllm.errors import RequestError
from mmvllm.inputs import Grid, MultiModalItem, PlaceholderRange
from mmvllm.lora import LoRARequest
from mmvllm.outputs import LogprobsById, RequestOutput
from mmvllm.pooling_params import PoolingParams
from mmvllm.sampling_params import SamplingParams
from mmvllm.scheduler.beams import Beams

if TYPE_CHECKING:
    from mmvllm.lora.adapters import Adapter
    from mmvllm.scheduler.detokenizer import CompletionText
    from mmvllm.scheduler.prompt_logprobs import PromptOutputs
    from mmvllm.utils.stopwatch import Encoding


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(Enum):
    """Why a sequence last left RUNNING. Outputs never say PREEMPTED: such a sequence waits and runs again."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORTED = "aborted"
    PREEMPTED = "preempted"
    ERROR = "error"


class Constraint(Protocol):
    """What may follow the tokens of one sequence.

    `depends_on_text` tells whether that changes from token to token; then a token is sampled only when all tokens
    before it have been seen.
    """

    depends_on_text: bool

    def restrict(self, seq: "Sequence", allowed: np.ndarray) -> None:
        """Clear the bits of tokens that may not follow `seq.token_ids`; raises ConstraintFailed.

        `allowed` (ceil(V / 32),) uint32, as in `kernels/token_mask.py`, has those that other constraints allow. It is
        called in a thread, and never twice at the same time.
        """


class Sequence:
    """The tokens of one completion and how far they have been computed.

    There are no phases: while `num_computed_tokens < num_tokens` the scheduler hands out tokens to compute, and a
    sequence that has caught up gets its next token sampled.
    """

    _seq_ids = count()

    def __init__(
        self,
        token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        request_id: str,
        block_size: int,
        mm_items: tuple[MultiModalItem, ...] = (),
        positions: np.ndarray | None = None,
        mrope_position_delta: int = 0,
        max_num_tokens: int | None = None,
        seed: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        completion_text: "CompletionText | None" = None,
        constraints: tuple[Constraint, ...] = (),
        waits_for_tokens: bool = False,
        prompt_outputs: "PromptOutputs | None" = None,
        adapter: "Adapter | None" = None,
    ):
        """`positions` (3, T) are the prompt's; `max_num_tokens` counts prompt and completion."""
        self.seq_id = next(self._seq_ids)
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.block_size = block_size
        self.completion_text = completion_text  # where there are stop strings
        self.constraints = constraints
        self.is_beam = sampling_params.beam_width is not None  # the search may give it the tokens of another beam
        self.waits_for_tokens = waits_for_tokens or self.is_beam  # what may follow depends on all tokens before it
        self.prompt_outputs = prompt_outputs  # outputs of the prompt's hidden states, if any are asked for

        self.adapter = adapter
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        longest = self.num_prompt_tokens + sampling_params.max_tokens
        self.max_num_tokens = longest if max_num_tokens is None else min(longest, max_num_tokens)
        self.mm_items = mm_items
        self.mm_end = mm_items[-1].end if mm_items else 0  # tokens that the last item ends at
        self.positions = np.tile(np.arange(len(token_ids)), (3, 1)) if positions is None else positions
        self.mrope_position_delta = mrope_position_delta

        # Written by the scheduler while the sequence waits or runs. Once its request has finished, the output processor
        # writes the tokens, log-probabilities and reason that beam search found, and sorts the sequences of a group.
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_computed_tokens = 0
        self.num_inflight_tokens = 0  # computed by steps that were launched and are not committed yet
        self.is_decoding = False  # whether all that it computes, while it runs, are tokens sampled since it began to
        self.req_index: int | None = None  # into `InputBatch` and `SamplingStates`, while it runs
        self.adapter_slot: int | None = None  # while it runs, if it has an adapter
        self._num_cached_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None
        self.forked_from: Sequence | None = None  # of a beam: has all of its tokens but the last
        self.first_token_time: float | None = None
        self.logprobs: list[LogprobsById] = []  # the output processor deletes those that only a delta was to have
        self.cumulative_logprob = 0.0

        # Written by the output processor.
        self.next_repetition_check = 0  # completion tokens before which none can be found
        self.score: float | None = None  # that the completions of its group were ranked by, at the end

        # Written by the executor.
        self.encodings: list[Encoding] = []  # runs of the ViT that had items of this sequence

        # Written by the block manager.
        self.block_table: list[int] = []
        self.prefix_ids: list[int] = []  # of the leading blocks that are in the prefix cache

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, key):
        return self.token_ids[key]

    def __lt__(self, other: "Sequence") -> bool:
        """Order of service: lower `priority` first, then earlier arrival."""
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, float, int]:
        return self.priority, self.arrival_time, self.seq_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def output_token_ids(self) -> list[int]:
        """`completion_token_ids` under vLLM's name."""
        return self.completion_token_ids

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def temperature(self) -> float:
        return self.sampling_params.temperature

    @property
    def max_tokens(self) -> int:
        return self.sampling_params.max_tokens

    @property
    def ignore_eos(self) -> bool:
        return self.sampling_params.ignore_eos

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache when the sequence was first scheduled."""
        return self._num_cached_tokens

    @num_cached_tokens.setter
    def num_cached_tokens(self, number: int) -> None:
        assert number % self.block_size == 0, f"{number} cached tokens, blocks have {self.block_size}"
        self._num_cached_tokens = number

    @property
    def pixel_values(self) -> tuple[torch.Tensor, ...]:
        return tuple(item.patches for item in self.mm_items)

    @property
    def image_grid_thw(self) -> tuple[Grid, ...]:
        return tuple(item.grid for item in self.mm_items)

    @property
    def vision_placeholders(self) -> tuple[PlaceholderRange, ...]:
        return tuple(item.placeholder for item in self.mm_items)

    def num_media_tokens(self, modality: str) -> int:
        """Placeholder tokens of the images or of the videos."""
        return sum(item.num_tokens for item in self.mm_items if item.modality == modality)

    def mm_items_in(self, start: int, end: int) -> range:
        """Indices of the items whose placeholders are among tokens [start, end)."""
        return range(
            bisect_right(self.mm_items, start, key=lambda item: item.end),
            bisect_left(self.mm_items, end, key=lambda item: item.offset),
        )

    @property
    def num_blocks(self) -> int:
        """Blocks that all tokens need."""
        return -(-self.num_tokens // self.block_size)

    @property
    def num_skippable_tokens(self) -> int:
        """Leading tokens that need not be computed where their keys and values are cached.

        The last token is computed for its logits, and tokens whose prompt outputs are missing are computed too.
        """
        last = self.num_tokens - 1
        if self.prompt_outputs is None or self.prompt_outputs.is_complete:
            return last
        return min(last, self.prompt_outputs.next_token)

    @property
    def num_cached_blocks(self) -> int:
        return len(self.prefix_ids)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> list[int]:
        """The token ids of block i."""
        assert 0 <= i < self.num_blocks, f"block {i} of {self.num_blocks}"
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def last_block(self) -> list[int]:
        block = self.block(self.num_blocks - 1)
        assert len(block) == self.last_block_num_tokens, f"{len(block)} tokens, want {self.last_block_num_tokens}"
        return block

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def positions_of(self, start: int, end: int) -> np.ndarray:
        """M-RoPE positions (3, end - start) of tokens [start, end), of prompt and completion alike."""
        prompt = self.positions[:, start:end]
        completion = np.arange(max(start, self.num_prompt_tokens), end) + self.mrope_position_delta
        return np.concatenate([prompt, np.broadcast_to(completion, (3, len(completion)))], axis=1)


@dataclass(slots=True)
class SequenceGroup:
    """The completions of one request; the first computes the prompt, the others share its blocks.

    These are `SamplingParams.n`; or as many as `best_of` or `beam_width` says until the request has finished, of which
    n are returned then.
    """

    seqs: list[Sequence]
    trace_headers: Mapping[str, str] | None = None  # of the request that came over a network, for the caller's tracing
    preparation: tuple[float, float] | None = None  # when it began and ended
    prompt: str | None = None  # its text
    lora_request: LoRARequest | None = None
    pooling_params: PoolingParams | None = None  # where nothing is generated
    keeps_logprobs: bool = True  # False removes log-probabilities of completions once a delta has them
    error: str | RequestError | None = None  # the latter where the request is to blame
    output: RequestOutput | None = None  # written by the engine, once the request has finished
    beams: "Beams[Sequence] | None" = None  # of a beam search

    @property
    def first_seq(self) -> Sequence:
        return self.seqs[0]

    @property
    def is_single_seq(self) -> bool:
        return len(self.seqs) == 1

    @property
    def seqs_dict(self) -> dict[int, Sequence]:
        return {seq.seq_id: seq for seq in self.seqs}

    @property
    def request_id(self) -> str:
        return self.first_seq.request_id

    @property
    def arrival_time(self) -> float:
        return self.first_seq.arrival_time

    @property
    def priority(self) -> int:
        return self.first_seq.priority

    @property
    def sampling_params(self) -> SamplingParams:
        return self.first_seq.sampling_params

    @property
    def adapter_name(self) -> str | None:
        return None if self.lora_request is None else self.lora_request.lora_name

    @property
    def num_bytes(self) -> int:
        """Host memory of the items' patches."""
        return sum(item.patches.nbytes for item in self.first_seq.mm_items)

    @property
    def has_begun(self) -> bool:
        """Whether one of them runs, or has run and waits to run again."""
        return any(seq.status is not SequenceStatus.WAITING or seq.num_completion_tokens for seq in self.seqs)

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.seqs)
