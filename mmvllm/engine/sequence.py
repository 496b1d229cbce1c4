"""One request in flight: a `Sequence` per answer, a `SequenceGroup` per request."""

import time
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch

from mmvllm.engine.vision_inputs import VisionInputs
from mmvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmvllm.engine.detokenizer import AnswerText


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(Enum):
    """Why a sequence last left RUNNING. Outputs never say PREEMPTED: such a sequence waits and comes back."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    PREEMPTED = "preempted"
    ERROR = "error"


class Sequence:
    """The tokens of one answer and how far they have been computed.

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
        seed: int = 0,
        vision: VisionInputs | None = None,
        positions: np.ndarray | None = None,
        mrope_position_delta: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        answer_text: "AnswerText | None" = None,
    ):
        self.seq_id = next(self._seq_ids)
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.block_size = block_size
        self.answer_text = answer_text  # where there are stop strings, or somebody reads along

        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.vision = vision or VisionInputs()
        self.positions = np.tile(np.arange(len(token_ids)), (3, 1)) if positions is None else positions
        self.mrope_position_delta = mrope_position_delta

        # Written by the scheduler.
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # of the prompt, when it was first scheduled; a multiple of block_size
        self.first_token_time: float | None = None
        self.logprobs: list[dict[int, float]] = []
        self.cumulative_logprob = 0.0

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
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def pixel_values(self) -> tuple[torch.Tensor, ...]:
        return self.vision.pixel_values

    @property
    def image_grid_thw(self) -> tuple[tuple[int, int, int], ...]:
        return self.vision.image_grid_thw

    @property
    def vision_placeholders(self) -> tuple[tuple[int, int], ...]:
        return self.vision.vision_placeholders

    @property
    def num_blocks(self) -> int:
        """Blocks that all tokens need."""
        return -(-self.num_tokens // self.block_size)

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
        return self.block(self.num_blocks - 1)

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def positions_of(self, start: int, end: int) -> np.ndarray:
        """M-RoPE positions (3, end - start) of tokens [start, end), of prompt and answer alike."""
        prompt = self.positions[:, start:end]
        answer = np.arange(max(start, self.num_prompt_tokens), end) + self.mrope_position_delta
        return np.concatenate([prompt, np.broadcast_to(answer, (3, len(answer)))], axis=1)


@dataclass(slots=True)
class SequenceGroup:
    """The `SamplingParams.n` answers to one request; the leader computes the prompt, the others share its blocks."""

    seqs: list[Sequence]
    error: str | None = None
    children_started: bool = False

    @property
    def leader(self) -> Sequence:
        return self.seqs[0]

    @property
    def request_id(self) -> str:
        return self.leader.request_id

    @property
    def has_begun(self) -> bool:
        """Whether one of them runs, or has and waits for its next turn."""
        return any(seq.status is not SequenceStatus.WAITING or seq.num_completion_tokens for seq in self.seqs)

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.seqs)
