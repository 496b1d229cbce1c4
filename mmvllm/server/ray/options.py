"""Options of a deployment on Ray Serve; importing this module does not need Ray."""

from dataclasses import dataclass

from mmvllm.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class RayServeOptions:
    """Where replicas run, how many there are, and how requests are routed to them.

    Args:
        address: "local" starts Ray on this machine for this server; "auto", "host:port" or "ray://..." joins a cluster.
        min_replicas, max_replicas: bounds of the number of replicas, which have one engine each. Within them, the
            number follows the requests in flight.
        cpus_per_replica: CPU cores of each replica, and torch threads on a CPU.
        session_affinity: route requests with the same x-session-id header to the same replica.
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
