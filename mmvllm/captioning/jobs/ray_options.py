"""Options for captioning on Ray Data; importing this module does not need Ray."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RayOptions:
    """The Ray cluster of a job, and its engines.

    Args:
        address: address of a Ray cluster: auto, HOST:PORT or ray://...; local starts Ray on this machine. A session
            that this process has already joined is used as it is.
        num_actors: number of Ray actors; each has one engine.
        cpus_per_actor: CPU cores, and torch threads, of each actor.
        gpus_per_actor: GPUs of each actor, from 0 to 1; by default tensor_parallel_size if there is a GPU, otherwise 0.
            Engines that share a GPU need num_kvcache_blocks, because each would otherwise take all free memory.
    """

    address: str = "local"
    num_actors: int = 1
    cpus_per_actor: int = 1
    gpus_per_actor: float | None = None

    def __post_init__(self):
        for name in ("num_actors", "cpus_per_actor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.gpus_per_actor is not None and not 0 <= self.gpus_per_actor <= 1:
            raise ValueError(
                f"gpus_per_actor must be from 0 to 1, got {self.gpus_per_actor}; for an engine on several GPUs give "
                "tensor_parallel_size instead"
            )
