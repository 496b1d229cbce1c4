"""Data parallel engines: several engines with the same model, one process each."""

import atexit
import logging
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import torch

from mmvllm.config import EngineConfig, ModelConfig
from mmvllm.engine.tokenizer import eos_token_ids_of, load_tokenizer
from mmvllm.errors import EngineFailed, RequestError
from mmvllm.lora import LoRARequest
from mmvllm.lora.adapters import AdapterStore, model_without_weights
from mmvllm.models.lora import linear_regions
from mmvllm.models.splitting import rank_config
from mmvllm.parallel.engine_core import AddCommand, EngineOutputs, EngineReady
from mmvllm.parallel.engine_core_client import STOP_SECONDS, Command
from mmvllm.parallel.placement import place_engines
from mmvllm.parallel.supervisor import EngineListener, EngineSupervisor
from mmvllm.processes.start import check_may_start
from mmvllm.sampling.grammar import GrammarCompiler
from mmvllm.worker.checkpoint import read_checkpoint

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 5  # of each engine, one after the other, after which none is started any more


class DataParallelEngines:
    """Starts and stops the engines, and has what request preparation needs; this process loads no weights.

    Args:
        config: of each engine, but for the device, which `place_engines` chooses.
        size: number of engines.
        release_after: as for `EngineThread`, of each.

    The constructor waits until all are ready. Raises what an engine and `place_engines` raise.
    """

    def __init__(self, model: str | Path | None, config: EngineConfig, size: int, release_after: float | None = None):
        check_may_start()
        placements = place_engines(size, config)
        # What is read here does not depend on the device, and this process must take no memory of a GPU.
        checkpoint = read_checkpoint(model, replace(config, device="cpu", tensor_parallel_size=1))
        rank_config(checkpoint.model_config, config.tensor_parallel_size)  # refuses sizes before anything is started
        self.size, self.device = size, torch.device("cpu")
        self.seed = config.seed
        self._adapters = _adapter_checks(checkpoint.model_config, config) if config.enable_lora else None
        self.model_config, self.media_rules = checkpoint.model_config, checkpoint.media_rules
        self.image_config, self.video_config = checkpoint.image_config, checkpoint.video_config
        self.tokenizer = load_tokenizer(checkpoint.folder, config.chat_template)
        eos_token_ids = eos_token_ids_of(self.model_config, self.tokenizer)
        self.grammars = GrammarCompiler(self.tokenizer, eos_token_ids, self.model_config.vocab_size)
        self._changed = threading.Condition()
        self._ready_messages: list[EngineReady | None] = [None] * size  # of engines that are up
        self._reasons = ["it is being started"] * size  # why the others are not
        self._startup_errors: list[Exception] = []
        self._listener: EngineListener | None = None
        setup = checkpoint.folder, replace(config, device=placements[0].device), release_after
        self._supervisors = [EngineSupervisor(i, setup, placement.env, self) for i, placement in enumerate(placements)]
        # At exit this must run before multiprocessing's own handler, which was registered first and would wait.
        atexit.register(_exit_if_alive, weakref.ref(self))
        try:
            for supervisor in self._supervisors:
                supervisor.start()
            ready = self._wait_until_ready()
        except BaseException:
            self.exit()
            raise
        self.ready_messages = tuple(ready)
        self.max_model_len = min(own.max_model_len for own in ready)
        self.max_num_seqs = sum(own.max_num_seqs for own in ready)
        self.block_size = ready[0].block_size

    @property
    def pids(self) -> list[int | None]:
        """The ids of the processes."""
        return [supervisor.pid for supervisor in self._supervisors]

    def load_adapter(self, lora_request: LoRARequest | None) -> None:
        """Refuse an adapter that cannot be used; each engine loads the adapters of its requests."""
        if lora_request is not None:
            if self._adapters is None:
                raise RequestError("lora_request needs engines with enable_lora=True", param="lora_request")
            self._adapters.load(lora_request)

    def reasons_down(self) -> list[str | None]:
        """For each engine the reason why it is down, or None if it is up."""
        with self._changed:
            return [None if ready else why for ready, why in zip(self._ready_messages, self._reasons, strict=True)]

    def listen(self, listener: EngineListener) -> None:
        """Report engine events to `listener` from now on, beginning with the engines that are down."""
        with self._changed:
            self._listener = listener
            for index, ready in enumerate(self._ready_messages):
                if ready is None:
                    listener.on_lost(index, self._reasons[index], None)

    def send(self, index: int, command: Command) -> None:
        """A command for an engine that is up."""
        self._supervisors[index].send(command)

    def has_failed(self) -> bool:
        """Whether no engine is up, and the last `MAX_FAILED_STARTS` starts of each have failed."""
        with self._changed:
            is_up = any(self._ready_messages)
        return not is_up and all(supervisor.num_failed_starts >= MAX_FAILED_STARTS for supervisor in self._supervisors)

    def give_up(self) -> None:
        """Stop all engines, and restart none."""
        for supervisor in self._supervisors:
            supervisor.stop()

    def exit(self) -> None:
        """End all processes; safe to call twice, and called at interpreter exit."""
        self.give_up()
        until = time.monotonic() + STOP_SECONDS
        for supervisor in self._supervisors:
            supervisor.join(until)

    def on_ready(self, index: int, ready: EngineReady) -> None:
        with self._changed:
            self._ready_messages[index] = ready
            self._changed.notify_all()
            listener = self._listener
        if listener is not None:
            listener.on_ready(index, ready)

    def on_outputs(self, index: int, outputs: EngineOutputs) -> None:
        if self._listener is not None:
            self._listener.on_outputs(index, outputs)

    def on_unsendable(self, index: int, command: AddCommand, error: Exception) -> None:
        self._listener.on_unsendable(index, command, error)

    def on_lost(self, index: int, reason: str, startup_error: Exception | None) -> None:
        with self._changed:
            self._ready_messages[index], self._reasons[index] = None, reason
            listener = self._listener
            if listener is None:
                self._startup_errors.append(startup_error or EngineFailed(f"engine {index} did not start: {reason}"))
                self._changed.notify_all()
        if listener is not None:
            logger.warning("engine %d has ended and is started again: %s", index, reason)
            listener.on_lost(index, reason, startup_error)

    def _wait_until_ready(self) -> list[EngineReady]:
        with self._changed:
            self._changed.wait_for(lambda: all(self._ready_messages) or self._startup_errors)
            if self._startup_errors:
                raise self._startup_errors[0]
            return [*self._ready_messages]


def _adapter_checks(model_config: ModelConfig, config: EngineConfig) -> AdapterStore:
    """Reads adapters for a model without weights, and keeps nothing but that they can be used."""
    model = model_without_weights(model_config)
    return AdapterStore(model, linear_regions(model), config.max_lora_rank, torch.float32, torch.device("meta"))


def _exit_if_alive(ref: "weakref.ref[DataParallelEngines]") -> None:
    engines = ref()
    if engines is not None:
        engines.exit()
