"""Ranks as threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from mmvllm.processes.ranks import ConnectedRanks, RanksFailed

CPU = torch.device("cpu")


def on_ranks(size: int, call: Callable[[ConnectedRanks], Any]) -> list[Any]:
    """What `call` returns for each of several ranks, which run at the same time; raises the error of one that fails."""
    store, connected = dist.HashStore(), []  # connected until all are done

    def run(rank: int) -> Any:
        torch.set_num_threads(1)  # a setting of each thread
        ranks = ConnectedRanks.connect(store, rank, size, CPU)
        connected.append(ranks)
        try:
            with torch.inference_mode():
                return call(ranks)
        except BaseException:
            ranks._backend = None  # closes its connections, so that the others do not wait for it
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, RanksFailed)), errors[0])
    return [future.result() for future in futures]
