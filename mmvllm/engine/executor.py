"""Steps on one device: packed, run and sampled; what is launched is waited for later."""

from dataclasses import dataclass

import numpy as np

from mmvllm.engine.batch_builder import build_batch
from mmvllm.engine.model_runner import ModelRunner
from mmvllm.engine.sampler import Sampled, Sampler
from mmvllm.engine.scheduler import SampledToken, Schedule, Scheduler
from mmvllm.engine.sequence import Sequence
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
            return (_as_list(self.sampled) if self.sampled is not None else []), self.error
        except (RuntimeError, MemoryError) as error:
            return [], error.with_traceback(None)


class Executor:
    """Launches steps; nothing here waits for the device.

    The device executes what it is given in order, so a step may overwrite what earlier ones read: the buffers of CUDA
    graphs, and blocks of sequences that have finished in the meantime.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, scheduler: Scheduler):
        self.runner, self.sampler, self.scheduler = runner, sampler, scheduler
        self._rows: dict[tuple[int, int], int] = {}  # by sequence and number of preemptions

    def launch_next(self) -> Launched:
        """Schedule and launch a step."""
        watch = Stopwatch(self.runner.device)
        return self._launch(self.scheduler.schedule(), watch)

    def launch_ahead(self, running: Launched) -> Launched | None:
        """Launch the step after one whose tokens are not known yet; None where it cannot be foreseen."""
        if running.sampled is None:
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
            chunks = [chunk for chunk in scheduled.chunks if chunk.samples]
            rows = np.array([self._row(chunk.seq) for chunk in chunks], np.int32)
            sampled = self.sampler(logits, rows, np.array([chunk.end for chunk in chunks], np.int32))
            watch.mark("sampling")
        except (RuntimeError, MemoryError) as error:
            return Launched(scheduled, watch, error=error.with_traceback(None))  # a traceback would hold the tensors
        return Launched(scheduled, watch, sampled)

    def _row(self, seq: Sequence) -> int:
        """The sampler's row of a running sequence."""
        key = (seq.seq_id, seq.num_preemptions)
        if key not in self._rows:
            running = {(seq.seq_id, seq.num_preemptions) for seq in self.scheduler.running}
            self._rows = {key: row for key, row in self._rows.items() if key in running}
            self._rows[key] = min({*range(self.scheduler.max_num_seqs)} - {*self._rows.values()})
            self.sampler.enter(self._rows[key], seq)
        return self._rows[key]


def _as_list(sampled: Sampled) -> list[SampledToken]:
    tokens = sampled.tokens()
    found = [SampledToken(None if token_id < 0 else token_id) for token_id in tokens.token_ids]
    for place, own in tokens.logprobs.items():
        found[place] = SampledToken(found[place].token_id, own.logprob, own.logprobs)
    return found
