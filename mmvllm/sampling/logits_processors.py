"""A caller's own functions on a row of logits, with the arguments that vLLM gives them."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmvllm.sampling.constraints import ConstraintFailed
from mmvllm.scheduler.sequence import Sequence


def process(logits: Tensor, seq: Sequence) -> Tensor:
    """The logits (V,) float32 after all functions of a sequence; raises ConstraintFailed where one of them fails.

    A function takes (completion's token ids, logits) or (prompt's token ids, completion's token ids, logits), and
    returns logits (V,), which may be those that it got, changed.
    """
    for function in seq.sampling_params.logits_processors:
        try:
            made = function(*_arguments(function, seq), logits)
        except Exception as error:
            raise _failed(f"{_name(function)} raised {error!r}") from None
        if not _is_row(made, logits):
            what = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            required = f"a tensor {list(logits.shape)}, dense and of real numbers"
            raise _failed(f"{_name(function)} returned {what}, must be {required}")
        logits = made.to(logits.device, torch.float32)
    return logits


def _failed(reason: str) -> ConstraintFailed:
    return ConstraintFailed(f"logits_processors: {reason}", param="logits_processors")


def _is_row(made: Any, logits: Tensor) -> bool:
    """Whether it can stand for the logits; not a tensor without values, a sparse one, or one of complex numbers."""
    is_dense = isinstance(made, Tensor) and made.layout is torch.strided and not made.is_meta
    return is_dense and made.shape == logits.shape and not made.is_complex()


def _arguments(function: Callable, seq: Sequence) -> list[list[int]]:
    takes_prompt = len(inspect.signature(function).parameters) == 3
    return [seq.prompt_token_ids, seq.completion_token_ids] if takes_prompt else [seq.completion_token_ids]


def _name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)
