"""The other ranks of an engine, as rank 0 sees them: here, none."""

from collections.abc import Callable, Set
from typing import Any

from mmvllm.scheduler.step_inputs import StepInputs


class WorkerGroup:
    """The other ranks, as rank 0 sees them. This class is for a single rank; `MultiprocessGroup` starts several."""

    failure: str | None = None  # why nothing can be computed any more

    def __init__(self) -> None:
        self.on_failure: Callable[[], None] = lambda: None  # called in a thread, when there is a `failure`

    def send(self, inputs: StepInputs) -> None:
        """Let the other ranks run a step."""

    def confirm(self) -> None:
        """Wait for the reports on the oldest step; raises RuntimeError if it failed on another rank."""

    def settle(self) -> None:
        """Wait for the reports on all steps that were not confirmed: what they encoded is not relied on."""

    def has_encoder_output(self, digest: bytes) -> bool:
        """Whether the other ranks have an item's embeddings, if this one has; steps must be settled."""
        return True

    def keep_encoder_outputs(self, digests: Set[bytes]) -> None:
        """Free the embeddings of all items but `digests`."""

    def call(self, function: Callable[[Any], None]) -> None:
        """Let the other ranks call a function, which is pickled, with their `ModelRunner`."""

    def check(self) -> None:
        """Raise RanksFailed if a process has ended."""

    def explained(self, error: BaseException) -> BaseException:
        """The error; or what it follows from, the end of a process."""
        return error

    def exit(self) -> None:
        """End the processes; safe to call twice."""
