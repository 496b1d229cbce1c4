"""Whether a CPU multiplies float32 faster than bfloat16."""

import time
from functools import cache

import torch


@cache
def multiplies_float32_faster() -> bool:
    """Whether products of many rows take clearly less time in float32 than in bfloat16, measured once in about 10 ms.

    CPUs whose instructions for bfloat16 are slow, such as Emerald Rapids without AMX (109 Gflop/s a core, and 223 in
    float32), or are missing, also compute more precisely in float32. Others take half the time in bfloat16, so that
    noise does not change the answer.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # time of waiting for other threads would be counted
    try:
        times = [(_product_time(torch.float32), _product_time(torch.bfloat16)) for _ in range(10)]
    finally:
        torch.set_num_threads(threads)
    in_float32, in_bfloat16 = map(min, zip(*times, strict=True))
    return in_float32 < 0.75 * in_bfloat16


def _product_time(dtype: torch.dtype) -> float:
    x, weight = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    start = time.thread_time()
    x @ weight
    return time.thread_time() - start
