"""The engine: requests in, one step at a time, outputs out."""

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import PreTrainedTokenizerBase

from mmvllm.config import EngineArgs, EngineConfig
from mmvllm.engine.executor import Executor, InflightStep
from mmvllm.engine.input_processor import InputProcessor, Prompt
from mmvllm.engine.output_processor import DeltaStream, OutputProcessor
from mmvllm.engine.recovery import Recovery
from mmvllm.engine.stats import EngineStats, Meter, StepStats, step_stats
from mmvllm.engine.tokenizer import eos_token_ids_of, load_tokenizer
from mmvllm.errors import EngineFailed, RequestError, first_line
from mmvllm.inputs import EngineInput
from mmvllm.lora import LoRARequest
from mmvllm.lora.adapters import Adapter, AdapterStore, model_without_weights
from mmvllm.outputs import RequestOutput
from mmvllm.pooling_params import PoolingParams
from mmvllm.processes.ranks import RanksFailed
from mmvllm.processors.tensors import Array
from mmvllm.sampling.grammar import GrammarCompiler
from mmvllm.sampling.sampler import Sampler
from mmvllm.sampling_params import SamplingParams, with_defaults
from mmvllm.scheduler.block_manager import BlockManager
from mmvllm.scheduler.encoder_cache import EncoderCache
from mmvllm.scheduler.scheduler import Scheduler
from mmvllm.scheduler.sequence import FinishReason, SequenceGroup
from mmvllm.utils.fair_lock import FairLock
from mmvllm.utils.forks import OwnProcess
from mmvllm.utils.transfer import current_device
from mmvllm.worker.checkpoint import read_checkpoint
from mmvllm.worker.device_errors import is_fatal
from mmvllm.worker.multiprocess_group import start_runner

logger = logging.getLogger(__name__)


HAS_EXITED = "the engine has exited; make a new one"
# Parameters of the warm-up requests. Together they use every path of the sampler, whose kernels are compiled on their
# first use.
WARMUP_PARAMS = (
    SamplingParams(max_tokens=2, ignore_eos=True, seed=0),
    SamplingParams(
        max_tokens=2,
        ignore_eos=True,
        seed=0,
        min_tokens=1,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 0.1},
        no_repeat_ngram_size=2,
        logprobs=1,
        prompt_logprobs=1,
    ),
)


class LLMEngine:
    """Continuous batching over one model on one device. Threads that share an engine take turns."""

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **engine_args: Any,
    ):
        """Load a checkpoint, with a `config` or with its fields as `engine_args`.

        `tokenizer` may come from another engine with the same model, which saves time and memory.
        """
        if config is not None and engine_args:
            raise TypeError(f"LLMEngine was given a config and {', '.join(engine_args)}; give one or the other")
        checkpoint = read_checkpoint(model, config or EngineConfig.from_arguments("LLMEngine", model, **engine_args))
        self._folder = checkpoint.folder
        self.config = config = checkpoint.config
        self.process = OwnProcess()
        self.lock = FairLock(self.process)
        self.model_config, self.media_rules = checkpoint.model_config, checkpoint.media_rules
        self.image_config, self.video_config = checkpoint.image_config, checkpoint.video_config
        self.tokenizer = tokenizer or load_tokenizer(checkpoint.folder, config.chat_template)
        eos_token_ids = eos_token_ids_of(self.model_config, self.tokenizer)
        self.grammars = GrammarCompiler(self.tokenizer, eos_token_ids, self.model_config.vocab_size)
        self.model_runner = start_runner(checkpoint)
        self.device = self.model_runner.device  # the device of rank 0, which prompts' patches are copied to
        self.attention, self.max_model_len = self.model_runner.attention, self.model_runner.max_model_len
        self.block_size = self.model_runner.block_size
        bytes_per_embed = self.model_config.mm_embed_size * self.model_runner.dtype.itemsize
        self.adapters = self._adapter_store()
        self.encoder_cache = EncoderCache(config.encoder_cache_bytes, bytes_per_embed)
        self.input_processor = InputProcessor(
            self.model_config,
            self.media_rules,
            self.tokenizer,
            self.encoder_cache,
            self.grammars,
            eos_token_ids,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            seed=config.seed,
        )
        self.output_processor = OutputProcessor(
            self.tokenizer, eos_token_ids, self.media_rules and self.media_rules.boxes
        )
        self.scheduler = Scheduler(
            BlockManager(self.model_runner.num_blocks, self.block_size, config.enable_prefix_caching),
            self.encoder_cache,
            self.output_processor.finish_reason,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_vision_patches=config.max_vision_patches,
            max_loras=config.max_loras if config.enable_lora else 0,
        )
        sampler = Sampler(eos_token_ids, config.max_num_seqs, self.model_config.vocab_size, self.model_runner.device)
        self.executor = Executor(self.model_runner, sampler, self.scheduler)
        self.recovery = Recovery(self.scheduler, self.model_runner)
        self.on_step: Callable[[StepStats], None] | None = None  # called after every step
        self.on_finished: Callable[[SequenceGroup], None] | None = None  # called with each request that has an output
        # Steps do not overlap if a launch waits, for values or, on a CPU, for the computation itself.
        overlaps = self.model_runner.device.type == "cuda" and self.attention.in_graphs
        self._schedules_ahead = overlaps if config.async_scheduling is None else config.async_scheduling
        # The next step, if it was launched before this one's tokens were known.
        self._ahead: InflightStep | None = None
        self._request_numbers = count()
        self._is_exiting = self._exited = False
        self._exit_reason = HAS_EXITED
        self._failure: str | None = None  # why the engine can compute nothing any more
        self._meter = Meter()
        atexit.register(_exit_if_alive, weakref.ref(self))
        if not config.skip_warmup:
            try:
                self.warmup_model()
            except BaseException:
                self.exit()
                raise
            self._meter = Meter()  # excludes the warm-up

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLMEngine":
        """Create an engine from vLLM-style arguments; raise TypeError for `mm_processor_kwargs`, which `LLM` takes."""
        given = asdict(args)
        if given.pop("mm_processor_kwargs") is not None:
            raise TypeError("LLMEngine takes no mm_processor_kwargs; give them to LLM, or with each request")
        return cls(given.pop("model"), **given)

    def reload(self) -> "LLMEngine":
        """Return a new engine with the same model and config, after `exit` of this one; raise like the constructor.

        The new engine continues the counts of this one: `stats`, and the numbers of requests, because their random
        generators would otherwise repeat. It shares the compiled grammars and the adapters that were read, because
        requests are prepared with this engine.
        """
        engine = LLMEngine(self._folder, self.config, tokenizer=self.tokenizer)
        engine.input_processor.go_on_from(self.input_processor)
        engine.grammars, engine.adapters = self.grammars, self.adapters
        engine._request_numbers, engine._meter = self._request_numbers, self._meter
        engine.scheduler.num_preemptions = self.scheduler.num_preemptions
        return engine

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of sequences that run at the same time."""
        return self.config.max_num_seqs

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the checkpoint's sampling parameters over mmvllm's defaults, and `changes` over both.

        They come from generation_config.json. Raises ValueError for a wrong value, TypeError for an unknown name.
        """
        return SamplingParams(**with_defaults(changes, dict(self.model_config.sampling_defaults)))

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        pixel_values: Array | None = None,
        image_grid_thw: Array | None = None,
        vision_placeholders: Array | None = None,
        image_digests: Array | None = None,
        pixel_values_videos: Array | None = None,
        video_grid_thw: Array | None = None,
        second_per_grid_ts: Array | None = None,
        **options: Any,
    ) -> str:
        """Queue a request and return its id; raises RequestError for one that can never run.

        Args:
            prompt: an `EngineInput` from a processor; or text, or token ids (a list, an array or a tensor) with the
                placeholders already expanded.
            pixel_values: (P, patch_dim) of all images packed, or one array each: uint8 patches or normalized floats.
            image_grid_thw: (number of images, 3), in patches.
            vision_placeholders: (offset, length) of each image's tokens; found in the prompt by default.
            image_digests: bytes that identify each image in the caches; computed by default.
            pixel_values_videos, video_grid_thw: the same for videos.
            second_per_grid_ts: seconds between consecutive temporal patches of a video, if the model uses them.
            options: see `add`.
        """
        prepared = self.input_processor.engine_input(
            prompt,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            vision_placeholders=vision_placeholders,
            image_digests=image_digests,
            pixel_values_videos=pixel_values_videos,
            video_grid_thw=video_grid_thw,
            second_per_grid_ts=second_per_grid_ts,
        )
        return self.add(prepared, sampling_params, request_id, **options).request_id

    def add(
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        pooling: PoolingParams | None = None,
        prompt_logprobs_from: int = 1,
        lora_request: LoRARequest | None = None,
        keeps_logprobs: bool = True,
    ) -> SequenceGroup:
        """Queue a prepared request and return its sequences; raises RequestError for one that can never run.

        Args:
            priority: lower runs first; among equals, the earlier arrival.
            cache_salt: prefix cache entries are shared only among requests with the same salt.
            trace_headers: kept with the request for the caller.
            pooling: compute the `embedding` of the prompt and generate nothing.
            prompt_logprobs_from: index of the prompt token at which `SamplingParams.prompt_logprobs` begin; earlier
                tokens may come from the prefix cache.
            lora_request: the adapter of the request; read here unless `load_adapter` has read it.
            keeps_logprobs: False drops a completion's log-probabilities once a delta has them; the output has none.
        """
        with self.lock:
            self.check_alive()
            request_id = self.new_request_id() if request_id is None else request_id
            if isinstance(request_id, str) and request_id in self.scheduler.groups:
                message = f"request_id {request_id!r} is already in flight"
                raise RequestError(message, param="request_id", value=request_id)
            group = self.input_processor.group(
                prompt,
                sampling_params or SamplingParams(),
                request_id,
                priority=priority,
                cache_salt=cache_salt,
                arrival_time=arrival_time,
                trace_headers=trace_headers,
                pooling=pooling,
                prompt_logprobs_from=prompt_logprobs_from,
                adapter=self.load_adapter(lora_request),
            )
            group.lora_request, group.pooling_params, group.keeps_logprobs = lora_request, pooling, keeps_logprobs
            self.scheduler.add(group)
            return group

    def generate(self, prompts: Iterable[Prompt], sampling_params: SamplingParams | None = None) -> list[RequestOutput]:
        """Add requests with the same parameters and step until all have finished; return outputs in the prompts' order.

        Raises RuntimeError while other requests are in flight, and any error of `add_request` and `step`.
        `LLM.generate` prepares requests while the engine steps, and may run beside other calls.
        """
        if not self.is_finished():
            raise RuntimeError(f"{len(self.scheduler.groups)} requests are in flight; finish or abort them")
        request_ids, outputs = [], {}
        try:
            for prompt in prompts:
                request_ids.append(self.add_request(prompt, sampling_params))
            while not self.is_finished():
                outputs |= {output.request_id: output for output in self.step()[0]}
        except BaseException:
            for request_id in request_ids:
                self.abort_request(request_id)
            raise
        return [outputs[request_id] for request_id in request_ids]

    def load_adapter(self, lora_request: LoRARequest | None) -> Adapter | None:
        """Read a request's adapter, in any thread, before the engine needs it; raise RequestError if it is invalid."""
        if lora_request is None:
            return None
        if not self.config.enable_lora:
            raise RequestError("lora_request needs an engine with enable_lora=True", param="lora_request")
        return self.adapters.load(lora_request)

    def _adapter_store(self) -> AdapterStore | None:
        runner = self.model_runner
        if runner.adapters is None:
            return None
        model, regions = model_without_weights(self.model_config), runner.adapters.regions
        return AdapterStore(model, regions, self.config.max_lora_rank, runner.dtype, runner.device)

    def new_request_id(self) -> str:
        """Return an id that no request in flight has."""
        ids = (f"auto-{number}" for number in self._request_numbers)
        return next(request_id for request_id in ids if request_id not in self.scheduler.groups)

    def delta_stream(self, group: SequenceGroup) -> DeltaStream:
        """Return a stream that follows a request from its beginning."""
        return self.output_processor.delta_stream(group)

    def step(self) -> tuple[list[RequestOutput], int]:
        """Run one step; return the requests that finished in it and the number of tokens computed.

        With `async_scheduling`, the next batch is launched before waiting for this one's tokens: the device computes
        while the host commits this step and schedules the one after. If several sequences run out of memory together,
        none is lost: they are recomputed, half as many at once. If a single one does, or the device fails in another
        way, the requests of this batch finish with `error` and the engine serves the others. If the device is lost, as
        after an illegal memory access, all requests finish with `error`, and this call and all later ones raise
        EngineFailed.
        """
        with self.lock:
            self._check_usable()
            with current_device(self.model_runner.device):
                try:
                    return self._step()
                except BaseException as error:
                    self._undo(error)
                    raise

    def _step(self) -> tuple[list[RequestOutput], int]:
        self.model_runner.worker_group.check()
        launched = self._ahead or self._launch()
        self._ahead = self._launch_ahead() if launched.error is None else None
        outputs = [self._finish(group) for group in self._commit(launched)]
        self._report(launched, outputs)
        self._drop_ahead_if_idle()
        return outputs, launched.scheduled.num_tokens

    def _launch(self) -> InflightStep:
        self.model_runner.worker_group.settle()  # an interrupted step may have left reports
        return self.executor.launch()

    def _launch_ahead(self) -> InflightStep | None:
        launched = self.executor.launch() if self._schedules_ahead else None
        return launched if launched is not None and launched.scheduled.num_tokens else None

    def _commit(self, launched: InflightStep) -> list[SequenceGroup]:
        """Wait for a step and commit its tokens, or recover from its error; return the requests that ended."""
        tokens, error = launched.wait()
        if error is None:
            return self.scheduler.postprocess(launched.scheduled, tokens)
        self._ahead = None  # sequences of a step launched behind the failed one are preempted, or have ended
        return self.recovery.recover(launched.scheduled, error)

    def _undo(self, error: BaseException) -> None:
        """Undo a step that raised, so that its sequences are recomputed; raise EngineFailed if the device is lost."""
        self._ahead = None
        error = self.model_runner.worker_group.explained(error)
        if is_fatal(error):
            self._fail(error)
        self.recovery.undo()

    def _fail(self, error: BaseException) -> NoReturn:
        self._failure = first_line(error)
        for group in self.recovery.end_all(f"the engine failed: {self._failure}"):
            self._finish(group)
        raise EngineFailed(f"the engine failed: {self._failure}") from error

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at any time and return its output so far; None if it is unknown or has finished."""
        with self.lock:
            group = self.scheduler.abort_seq_group(request_id, FinishReason.ABORTED)
            self._drop_ahead_if_idle()
            return None if group is None else self._finish(group)

    def reset_prefix_cache(self) -> None:
        """Forget the KV of all prompts; later prompts are computed from their beginning."""
        with self.lock:
            self.scheduler.block_manager.forget()

    def stats(self, num_preparing: int = 0) -> EngineStats:
        """Return the current state, and totals without the warm-up; may be called in any thread.

        Args:
            num_preparing: number of requests that the caller prepares for this engine.
        """
        return self._meter.stats(self.scheduler, num_preparing)

    def is_finished(self) -> bool:
        """Return whether no request is waiting or running."""
        return self.scheduler.is_finished()

    def has_unfinished_requests(self) -> bool:
        """Return whether requests are waiting or running; vLLM's name for the opposite of `is_finished`."""
        return not self.is_finished()

    def warmup_model(self) -> float:
        """Run a prefill and a decode, which compile kernels and allocate memory; return the seconds they took."""
        start = time.perf_counter()
        for params in WARMUP_PARAMS:
            group = self.add(self.input_processor.warmup_input(), params, cache_salt="warm-up")
            while group.output is None:
                self.step()
            if group.error is not None:
                raise RuntimeError(f"warm-up failed: {group.error}")
        seconds = time.perf_counter() - start
        logger.info("warm-up took %.2f s", seconds)
        return seconds

    def exit(self, reason: str = HAS_EXITED) -> None:
        """Abort all requests and free the device's memory; may be called twice, and is called at interpreter exit.

        A step that runs in another thread finishes before. `reason` is the error message for later requests and steps.
        """
        self._exit_reason = reason
        if not self.process.is_here:  # a fork has none of the engine's threads and processes
            return
        self._is_exiting = True
        with self.lock:
            if not self._exited:
                self._exited = True
                self._release()

    def _release(self) -> None:
        self._ahead = None
        for request_id in list(self.scheduler.groups):
            self.abort_request(request_id)
        device = self.model_runner.device
        with suppress(RuntimeError):  # the device may be lost; its memory is freed when the process ends
            if device.type == "cuda":
                # Includes a step launched ahead for requests that have ended, because other ranks take part in it.
                torch.cuda.synchronize(device)
        self.model_runner.worker_group.exit()
        del self.model_runner, self.executor, self.recovery
        with suppress(RuntimeError):
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def check_alive(self) -> None:
        """Raise EngineFailed once a device or a process is lost, and RuntimeError once `exit` has begun."""
        self._check_usable()
        try:
            self.model_runner.worker_group.check()
        except RanksFailed as error:
            raise EngineFailed(f"the engine failed: {first_line(error)}") from error

    def _check_usable(self) -> None:
        self.process.check()
        if self._failure is not None:
            raise EngineFailed(f"the engine failed: {self._failure}")
        if self._is_exiting:
            raise RuntimeError(self._exit_reason)

    def _finish(self, group: SequenceGroup) -> RequestOutput:
        group.output = self.output_processor.output(group)
        if self.on_finished is not None:
            self.on_finished(group)
        return group.output

    def _report(self, launched: InflightStep, outputs: list[RequestOutput]) -> None:
        if self._ahead is None:
            launched.watch.mark("commit")
        stats = step_stats(launched.scheduled, self.scheduler, launched.watch.seconds())
        self._meter.add_step(stats)
        self._meter.add_outputs(outputs, self.output_processor.take_num_tokens())
        if self.on_step is not None:
            self.on_step(stats)

    def _drop_ahead_if_idle(self) -> None:
        """Drop a step that was launched ahead if all its sequences have ended, without waiting for it.

        The step may have failed, and then the embeddings of the items that it was to encode are missing.
        """
        if self._ahead is not None and self.scheduler.is_finished():
            self._ahead = None
            with suppress(RanksFailed):  # the next step detects it
                self.recovery.undo()


def _exit_if_alive(ref: "weakref.ref[LLMEngine]") -> None:
    engine = ref()
    if engine is not None:
        engine.exit()
