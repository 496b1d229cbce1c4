"""Ranks as threads of one process."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from mmvllm.ranks import ConnectedRanks, Ranks

CPU = torch.device("cpu")


def on_ranks(size: int, call: Callable[[Ranks], Any]) -> list[Any]:
    """What `call` returns for each of several connected ranks, which run at the same time; raises their first error."""
    store, done, results = dist.HashStore(), SimpleQueue(), [None] * size

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # a setting of each thread
        error = None
        try:
            ranks = ConnectedRanks.connect(store, rank, size, CPU)
            with torch.inference_mode():
                results[rank] = ranks, call(ranks)  # connected until all are done
        except BaseException as raised:
            error = raised
        done.put(error)

    for rank in range(size):
        Thread(target=run, args=(rank,), daemon=True).start()  # a rank may wait for one that failed
    for _ in range(size):
        if (error := done.get()) is not None:
            raise error
    return [result for _, result in results]
