"""How many threads torch computes with in this process, while ranks on other processes share the CPU."""

import threading

import torch


class ThreadShares:
    """The shares of all engines of this process: the smallest counts, and the whole once none is left."""

    def __init__(self):
        self._lock, self._whole, self._shares = threading.Lock(), 0, []

    def take(self, num_ranks: int) -> int:
        """The threads of each rank of an engine, from now on of this process too."""
        with self._lock:
            self._whole = self._whole if self._shares else torch.get_num_threads()
            self._shares.append(max(1, self._whole // num_ranks))
            torch.set_num_threads(min(self._shares))
            return self._shares[-1]

    def give_back(self, share: int) -> None:
        """An engine has ended."""
        with self._lock:
            self._shares.remove(share)
            torch.set_num_threads(min(self._shares, default=self._whole))


THREAD_SHARES = ThreadShares()
