"""Random numbers in [0, 1) as a function of a stream and an index, bit-equal in numpy and in Triton.

SplitMix64 (doi 10.1145/2660193.2660195): a counter times an odd constant, mixed by shifts and multiplications. Streams
begin at mixed seeds, so neighboring seeds give unrelated streams.
"""

import numpy as np
import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import tl, triton

STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def stream_of(seed: int) -> int:
    """Return the stream of the low 64 bits of a seed, as a signed 64-bit integer."""
    z = (seed + STEP) % 2**64
    z = (z ^ z >> 30) * FIRST % 2**64
    z = (z ^ z >> 27) * SECOND % 2**64
    z ^= z >> 31
    return z - (z >> 63 << 64)


def uniforms(streams: Tensor, indices: Tensor) -> Tensor:
    """Return number `indices` of each of `streams` (int64) as float64 multiples of 2**-53, computed on the host."""
    # numpy takes a third of torch's time for a few numbers, and shifts uint64.
    z = streams.cpu().numpy().view(np.uint64) + (indices.cpu().numpy().astype(np.uint64) + 1) * STEP
    z = (z ^ z >> 30) * FIRST
    z = (z ^ z >> 27) * SECOND
    return torch.from_numpy(((z ^ z >> 31) >> 11) * 2**-53).to(streams.device)


@triton.jit
def uniform(stream, index):
    """Return `uniforms` of one uint64 stream and one uint64 index."""
    z = stream + (index + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
