"""Launches steps: schedules, packs, runs and samples them without waiting for the device."""

from contextlib import nullcontext
from dataclasses import dataclass

from mmvllm.processes.signals import signals_deferred
from mmvllm.sampling.sampler import AsyncSamplerOutput, Sampler
from mmvllm.scheduler.output import SchedulerOutput
from mmvllm.scheduler.sampler_output import SamplerOutput
from mmvllm.scheduler.scheduler import Scheduler
from mmvllm.scheduler.step_inputs import pack_step
from mmvllm.utils.stopwatch import Stopwatch
from mmvllm.worker.model_runner import ModelRunner
from mmvllm.worker.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True)
class InflightStep:
    """A step that was launched on the device, unless there was an `error` or nothing to compute."""

    scheduled: SchedulerOutput
    watch: Stopwatch
    worker_group: WorkerGroup
    sampled: AsyncSamplerOutput | None = None
    error: RuntimeError | MemoryError | None = None

    def wait(self) -> tuple[SamplerOutput, RuntimeError | MemoryError | None]:
        """Wait for the step's tokens and return them, or the error that ended it on any rank."""
        if self.sampled is None:
            return SamplerOutput([]), self.error
        try:
            tokens = self.sampled.tokens()
            self.worker_group.confirm()
            return tokens, None
        except (RuntimeError, MemoryError) as error:
            return SamplerOutput([]), error.with_traceback(None)


class Executor:
    """Launches steps; nothing here waits for the device.

    The device runs steps in order, so a step may overwrite what earlier ones read: the buffers of CUDA graphs, and
    blocks of sequences that have finished in the meantime.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, scheduler: Scheduler):
        self.runner, self.sampler, self.scheduler = runner, sampler, scheduler
        self.clock: str | None = None  # clock of `Stopwatch`, for `StepStats.seconds`

    def launch(self) -> InflightStep:
        """Schedule, pack, run and sample a step; the data that it needs from the step in flight is on the device."""
        watch = Stopwatch(self.runner.device, self.clock)
        scheduled = self.scheduler.schedule()
        watch.mark("schedule")
        worker_group, ranks = self.runner.worker_group, self.runner.ranks
        if not scheduled.num_tokens:
            return InflightStep(scheduled, watch, worker_group)
        with signals_deferred() if ranks.size > 1 else nullcontext():  # once a step is sent, other ranks run it
            try:
                return InflightStep(scheduled, watch, worker_group, self._run(scheduled, watch))
            except (RuntimeError, MemoryError) as error:  # a traceback would keep the tensors alive
                return InflightStep(scheduled, watch, worker_group, error=error.with_traceback(None))
            finally:
                ranks.complete()

    def _run(self, scheduled: SchedulerOutput, watch: Stopwatch) -> AsyncSamplerOutput:
        for seq in scheduled.started:
            self.sampler.add_sequence(seq.req_index, seq)
        inputs = pack_step(scheduled, self.runner.ranks.size, self.scheduler.adapter_slots.num_slots)
        watch.mark("pack")
        pending = self.sampler.begin_masks(inputs.samples[0], scheduled)
        try:
            logits = self.runner.run(inputs, watch)
        finally:  # also after an error: threads read the sequences, which change after it
            masks = None if pending is None else pending.wait()
        if watch.encoding is not None:
            for seq in scheduled.encoded_sequences():
                seq.encodings.append(watch.encoding)
        sampled = self.sampler(logits, *inputs.samples, self.runner.samples, masks)
        sampled.prompt_outputs = self.runner.prompt_outputs
        watch.mark("sample")
        self.runner.append(sampled.input_ids)
        watch.mark("append")
        return sampled
