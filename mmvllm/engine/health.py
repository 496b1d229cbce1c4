"""The health of an engine, or of several."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The status of an engine: "ok", "failing" (requests failed in the last step), "draining", "stopped" or "failed".

    With several engines, the status is "ok" if one engine's is, and "starting" while none is up but one may be soon.
    """

    status: str
    reason: str | None = None
    engines: tuple["EngineHealth", ...] = ()  # each "ok", "failing" or "starting"; empty if there is one engine

    @property
    def is_live(self) -> bool:
        """Whether requests in flight are still served."""
        return self.status not in ("stopped", "failed")

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.status in ("ok", "failing")


def health_of(engines: tuple[EngineHealth, ...]) -> EngineHealth:
    """Combine the health of several engines: the best status counts."""
    best = min(engines, key=lambda engine: ("ok", "failing", "starting").index(engine.status))
    return EngineHealth(best.status, best.reason, engines)
