"""Sampling parameters of running sequences as the kernels read them: one packed row of 32-bit values per sequence."""

import numpy as np
import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import tl, triton

# Kernels read the columns by number: temperature is 0, repetition_penalty is 8.
ROW_PARAMS = np.dtype(
    [
        ("temperature", np.float32),  # 0 takes the largest logit
        ("top_k", np.int32),  # the size of the vocabulary keeps all tokens
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("stream", np.int64),  # of random numbers: `stream_of` a seed
        ("num_prompt_tokens", np.int32),
        ("counts_row", np.int32),  # row of the token counts that penalties read; 0 without penalties
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("unused", np.int32),  # keeps `stream` aligned
    ]
)


def packed(params: np.ndarray) -> Tensor:
    """View an array (N,) of `ROW_PARAMS` as (N, 12) int32, in the same memory."""
    return torch.from_numpy(params.view(np.int32).reshape(len(params), -1))


def column(params: Tensor, name: str) -> Tensor:
    """Return one parameter (R, 1) of packed rows (R, 12) int32."""
    columns, dtype = _COLUMNS[name]
    return params[:, columns].view(dtype)


def _columns(name: str) -> tuple[slice, torch.dtype]:
    dtype, offset = ROW_PARAMS.fields[name]
    return slice(offset // 4, (offset + dtype.itemsize) // 4), getattr(torch, dtype.name)


_COLUMNS = {name: _columns(name) for name in ROW_PARAMS.names}


@triton.jit
def load_float(params_ptr, column):
    return tl.load(params_ptr + column).to(tl.float32, bitcast=True)
