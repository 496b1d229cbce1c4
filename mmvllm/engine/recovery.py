"""Recovers from failed steps: no request is lost that can be recomputed."""

import logging

import torch

from mmvllm.scheduler.output import SchedulerOutput
from mmvllm.scheduler.scheduler import RECOVERY_STEPS, Scheduler
from mmvllm.scheduler.sequence import FinishReason, SequenceGroup
from mmvllm.worker.device_errors import is_fatal, is_out_of_memory
from mmvllm.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class Recovery:
    """Makes scheduler, encoder cache and runner agree again after a step that did not complete."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner):
        self._scheduler, self._runner = scheduler, runner

    def undo(self) -> None:
        """Preempt all sequences after a step was interrupted, because it may not have computed what it scheduled."""
        self._scheduler.preempt_all()
        self._agree_on_encoder_outputs()

    def recover(self, scheduled: SchedulerOutput, error: RuntimeError | MemoryError) -> list[SequenceGroup]:
        """Recover from a failed step and return the requests that end with an error; drop a step launched after it.

        Sequences that ran out of memory together are recomputed, half as many at once. Otherwise, the requests of this
        step fail, and the others of the step launched after it are recomputed. An error that `is_fatal` is raised
        again, because nothing can be computed.
        """
        if is_fatal(error):
            raise error
        failed: list[SequenceGroup] = []
        num_seqs = len(scheduled.chunks)
        if num_seqs > 1 and is_out_of_memory(error):
            self._reduce_batch_size(num_seqs, error)
        else:
            failed = self._fail(scheduled, error)
            self._scheduler.preempt_in_flight()
        self._agree_on_encoder_outputs()
        return failed

    def end_all(self, reason: str) -> list[SequenceGroup]:
        """End all requests, waiting ones too, with an error because the device is lost, and return them."""
        return [
            self._scheduler.abort_seq_group(request_id, FinishReason.ERROR, reason)
            for request_id in [*self._scheduler.groups]
        ]

    def _reduce_batch_size(self, num_seqs: int, error: RuntimeError | MemoryError) -> None:
        self._scheduler.reduce_batch_size(num_seqs)
        logger.warning(
            "a step of %d sequences ran out of memory; they are recomputed, and at most %d run at once from now on, "
            "one more after every %d steps: %r",
            *(num_seqs, self._scheduler.seq_limit, RECOVERY_STEPS, error),
        )
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()  # free blocks of the wrong sizes cannot be used

    def _fail(self, scheduled: SchedulerOutput, error: RuntimeError | MemoryError) -> list[SequenceGroup]:
        logger.error("a step failed: %s", error)
        reason = f"the step failed: {type(error).__name__}: {error}"
        alive = [chunk.seq for chunk in scheduled.chunks if not chunk.seq.is_finished]
        request_ids = dict.fromkeys(seq.request_id for seq in alive)  # each once, in order
        return [self._scheduler.abort_seq_group(request_id, FinishReason.ERROR, reason) for request_id in request_ids]

    def _agree_on_encoder_outputs(self) -> None:
        self._runner.worker_group.settle()
        self._scheduler.encoder_cache.keep_encoded(self._runner.has_encoder_output)
        self._runner.keep_encoder_outputs(self._scheduler.encoder_cache.encoded_digests)
        self._scheduler.adapter_slots.forget_unused()
