"""Options of a captioning run that neither change captions nor concern the output."""

from dataclasses import dataclass, field
from typing import Literal

from mmvllm.captioning.sources.timeouts import DEFAULT_TIMEOUTS, Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Which images a run takes, and how it works on them.

    Args:
        limit: caption at most this many images that are not recorded yet.
        shard: caption the I-th of N parts of the images, 1/N to N/N, which a hash of each path selects; give all N runs
            the same paths.
        accept_truncated: caption JPEGs that lack their last rows, which become gray; records have "truncated": true.
        fail_fast: stop at the first failure.
        ordered: record images in the order in which they are found, not as they finish.
        workers: number of threads that prepare images; by default one for each core, at most 8.
        worker_processes: prepare images in processes instead of threads: for many cores and a fast GPU.
        image_timeout: seconds in which each image must be downloaded or read, and decoded; it fails otherwise.
        video_timeout: seconds in which each video must be downloaded or read, and decoded; it fails otherwise.
        data_parallel_size: engines on this machine, each in a process with tensor_parallel_size CUDA devices or its
            part of the CPU's threads, and each with its own limits, such as cpu_kvcache_bytes; auto: as many as the
            CUDA devices allow, or one on a CPU.
    """

    limit: int | None = None
    shard: tuple[int, int] | None = field(default=None, metadata={"metavar": "I/N"})
    accept_truncated: bool = False
    fail_fast: bool = False
    ordered: bool = False
    workers: int | None = None
    worker_processes: bool = False
    image_timeout: float = DEFAULT_TIMEOUTS.image
    video_timeout: float = DEFAULT_TIMEOUTS.video
    data_parallel_size: int | Literal["auto"] = field(default=1, metadata={"metavar": "N"})

    @property
    def timeouts(self) -> Timeouts:
        """The time limits for loading; raises ArgumentError for invalid ones."""
        return Timeouts(self.image_timeout, self.video_timeout)
