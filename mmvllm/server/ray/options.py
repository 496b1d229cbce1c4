"""Options of a deployment on Ray Serve; importing this module does not need Ray."""

from dataclasses import dataclass

from mmvllm.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class RayServeOptions:
    """Where replicas run, how many there are, and how requests are routed to them.

    Args:
        address: address of a Ray cluster: auto, HOST:PORT or ray://...; local starts Ray on this machine.
        min_replicas: minimum number of replicas, each with one engine; needs max_replicas.
        max_replicas: maximum number of replicas, which Ray adds when more requests are in flight on each than
            max_num_seqs, or than 64 if it is not given.
        cpus_per_replica: CPU cores, and torch threads, of each replica.
        session_affinity: route requests with the same header x-session-id to the same replica, whose cache has their
            prefix.
    """

    address: str = "local"
    min_replicas: int = 1
    max_replicas: int = 1
    cpus_per_replica: int = 1
    session_affinity: bool = False

    def __post_init__(self) -> None:
        for name in ("min_replicas", "max_replicas", "cpus_per_replica"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.min_replicas > self.max_replicas:
            values = {"low": self.min_replicas, "high": self.max_replicas}
            raise ArgumentError("{min_replicas} is {low}, above {max_replicas}, {high}", **values)
