"""A step with prefills, packed as one batch: what decodes comes first."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mmvllm.scheduler.step_inputs import Prefills, StepInputs


class MixedTensors(NamedTuple):
    """The arrays of a `MixedStep` on the device; `blocks`, whose size depends on contexts, is the last."""

    decodes: Tensor
    req_indices: Tensor
    position_deltas: Tensor
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    mm_token_indices: Tensor
    logits_indices: Tensor
    samples: Tensor
    kv_lens: Tensor
    cu_seqlens_q: Tensor  # (D + F + 1,) int32, running sums of lengths
    cu_seqlens_k: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class MixedStep:
    """D sequences that decode, then P tokens of F prefills, with M embeddings; R sequences are sampled."""

    decodes: np.ndarray  # (3, D) int32, as in `StepInputs`
    req_indices: np.ndarray  # (F,) int64; this and the following as in `Prefills`
    position_deltas: np.ndarray  # (F,) int64
    blocks: np.ndarray  # (3, B) int64
    input_ids: np.ndarray  # (P,) int64
    positions: np.ndarray  # (3, P) int64
    slot_mapping: np.ndarray  # (P,) int64
    mm_token_indices: np.ndarray  # (M,) int64, among the D + P tokens
    logits_indices: np.ndarray  # (R + Q,) int64, among the D + P tokens: sampled ones, then those with prompt outputs
    samples: np.ndarray  # (2, R) int32
    query_lens: np.ndarray  # (D + F,) int32
    kv_lens: np.ndarray  # (D + F,) int32

    @classmethod
    def of(cls, inputs: StepInputs, new: Prefills) -> "MixedStep":
        """`new` are the prefills of `inputs`."""
        D = inputs.num_decodes
        query_lens = np.concatenate([np.ones(D, dtype=np.int32), new.query_lens])
        wants_token = np.concatenate([np.ones(D, dtype=bool), new.samples])
        logits_indices = query_lens.cumsum()[wants_token] - 1
        return cls(
            decodes=inputs.decodes,
            req_indices=new.req_indices,
            position_deltas=new.position_deltas,
            blocks=new.blocks,
            input_ids=new.input_ids,
            positions=new.positions,
            slot_mapping=new.slot_mapping,
            mm_token_indices=new.mm_token_indices + D,
            logits_indices=logits_indices
            if inputs.prompt_output_tokens is None
            else np.concatenate([logits_indices, inputs.prompt_output_tokens.token_indices + D]),
            samples=inputs.samples,
            query_lens=query_lens,
            kv_lens=np.concatenate([inputs.decodes[1], new.kv_lens]),
        )

    def arrays(self) -> MixedTensors:
        """What the device needs, still on the host."""
        return MixedTensors(
            decodes=self.decodes,
            req_indices=self.req_indices,
            position_deltas=self.position_deltas,
            input_ids=self.input_ids,
            positions=self.positions,
            slot_mapping=self.slot_mapping,
            mm_token_indices=self.mm_token_indices,
            logits_indices=self.logits_indices,
            samples=self.samples,
            kv_lens=self.kv_lens,
            cu_seqlens_q=_running_sum(self.query_lens),
            cu_seqlens_k=_running_sum(self.kv_lens),
            blocks=self.blocks,
        )


def _running_sum(lens: np.ndarray) -> np.ndarray:
    return np.concatenate([[np.int32(0)], lens.cumsum(dtype=np.int32)])
