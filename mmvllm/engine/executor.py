"""Steps on one device: packed, run and sampled; what is launched is waited for later."""

from dataclasses import dataclass

from mmvllm.engine.batch_builder import build_batch
from mmvllm.engine.model_runner import ModelRunner
from mmvllm.engine.sampler import Sampled, Sampler
from mmvllm.engine.scheduler import SampledToken, Schedule, Scheduler
from mmvllm.engine.stats import Stopwatch


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that was given to the device, unless there was an `error`, or nothing to compute."""

    scheduled: Schedule
    watch: Stopwatch
    sampled: Sampled | None = None
    error: RuntimeError | MemoryError | None = None

    def wait(self) -> tuple[list[SampledToken], RuntimeError | MemoryError | None]:
        """The step's tokens, or the error that ended it."""
        try:
            return (self.sampled.tokens() if self.sampled is not None else []), self.error
        except (RuntimeError, MemoryError) as error:
            return [], error.with_traceback(None)


class Executor:
    """Launches steps; nothing here waits for the device.

    The device executes what it is given in order, so a step may overwrite what earlier ones read: the buffers of CUDA
    graphs, and blocks of sequences that have finished in the meantime.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, scheduler: Scheduler):
        self.runner, self.sampler, self.scheduler = runner, sampler, scheduler

    def launch_next(self) -> Launched:
        """Schedule and launch a step."""
        watch = Stopwatch(self.runner.device)
        return self._launch(self.scheduler.schedule(), watch)

    def launch_ahead(self, running: Launched) -> Launched | None:
        """Launch the step after one whose tokens are not known yet; None where it cannot be foreseen."""
        if running.sampled is None or not running.sampled.allows_launch_ahead:
            return None
        watch = Stopwatch(self.runner.device)
        scheduled = self.scheduler.schedule_ahead(running.scheduled)
        return None if scheduled is None else self._launch(scheduled, watch, running.sampled)

    def _launch(self, scheduled: Schedule, watch: Stopwatch, previous: Sampled | None = None) -> Launched:
        """Pack, run and sample a schedule, on the ids that the previous step is sampling if it is given."""
        watch.mark("schedule")
        if not scheduled.chunks:
            return Launched(scheduled, watch)
        input_ids = None if previous is None else previous.input_ids
        try:
            batch = build_batch(scheduled, self.runner.block_size, self.runner.device, input_ids)
            watch.mark("pack")
            logits = self.runner.run(batch, watch)
            seqs = [chunk.seq for chunk in scheduled.chunks if chunk.samples]
            sampled = self.sampler(logits, seqs, 0 if previous is None else 1)
            watch.mark("sampling")
        except (RuntimeError, MemoryError) as error:
            return Launched(scheduled, watch, error=error.with_traceback(None))  # a traceback would hold the tensors
        return Launched(scheduled, watch, sampled)
