"""The engine: requests in, one step at a time, outputs out."""

import atexit
import json
import logging
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from transformers import AutoTokenizer

from mmvllm.config import EngineConfig, ModelConfig
from mmvllm.engine.batch import build_batch
from mmvllm.engine.block_manager import BlockManager
from mmvllm.engine.detokenizer import AnswerText
from mmvllm.engine.encoder_cache import EncoderCache
from mmvllm.engine.model_runner import ModelRunner
from mmvllm.engine.sampler import Sampled, Sampler
from mmvllm.engine.scheduler import RECOVERY_STEPS, Schedule, Scheduler
from mmvllm.engine.sequence import FinishReason, Sequence, SequenceGroup
from mmvllm.engine.stats import StepStats, Stopwatch, step_stats
from mmvllm.engine.vision_inputs import VisionInputs
from mmvllm.errors import PromptTooLong
from mmvllm.layers.attention import AttentionBackend, choose_attention
from mmvllm.layers.linear import pack_weights
from mmvllm.layers.transfer import current_device
from mmvllm.models.weights import load_model, resolve_folder
from mmvllm.outputs import CompletionOutput, RequestOutput
from mmvllm.processors.chat import tokenize
from mmvllm.processors.image import ImageProcessorConfig
from mmvllm.processors.positions import mrope_positions
from mmvllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the device has been given, unless there was an `error`, or nothing to compute."""

    scheduled: Schedule
    watch: Stopwatch
    sampled: Sampled | None = None
    error: RuntimeError | MemoryError | None = None


class LLMEngine:
    """Continuous batching over one model on one device; not thread-safe: one thread owns it."""

    def __init__(self, model: str | Path | None = None, config: EngineConfig | None = None):
        """Load a checkpoint and make room for its KV cache; raises ValueError for what cannot be served."""
        self.config = config = config or EngineConfig()
        device = config.resolve_device()
        if config.quantization and device.type != "cpu":
            raise ValueError(f"quantization={config.quantization!r} runs on a CPU only; this is {device.type}")
        folder = resolve_folder(model, with_weights=config.load_format != "dummy")
        self.model_config = ModelConfig.from_pretrained(folder)
        dtype = config.resolve_dtype(self.model_config.dtype, device)
        self.image_config = ImageProcessorConfig.from_pretrained(folder)
        self.tokenizer = _load_tokenizer(folder)
        self._check_image_config(folder)
        head_dims = [part.head_dim for part in (self.model_config, self.model_config.vision) if part]
        self.attention, reason = choose_attention(
            config.attention_backend, head_dims, device, dtype, config.kvcache_block_size
        )
        logger.info("attention backend: %s (%s)", self.attention.name, reason)
        model = load_model(folder, self.model_config, device, dtype, config.load_format, config.seed, self.attention)
        if device.type == "cpu":
            pack_weights(model, dtype, int8=config.quantization == "int8")
        self.block_size = config.kvcache_block_size or self.attention.block_size
        self.model_runner = ModelRunner(
            model,
            self.model_config,
            config,
            self.image_config,
            device,
            dtype,
            self.block_size,
            _uses_graphs(config, device, self.attention),
        )
        self.max_model_len = self._resolve_max_model_len()
        if self.model_runner.use_graphs:
            self.model_runner.capture_graphs(config.max_num_seqs, self.max_model_len)
        block_manager = BlockManager(self.model_runner.num_blocks, self.block_size, config.enable_prefix_caching)
        self.encoder_cache = EncoderCache(config.encoder_cache_bytes, self.model_config.hidden_size * dtype.itemsize)
        eos_token_ids = self.model_config.eos_token_ids | {self.tokenizer.eos_token_id} - {None}
        self.sampler = Sampler(eos_token_ids)
        self.scheduler = Scheduler(
            block_manager,
            self.encoder_cache,
            eos_token_ids=eos_token_ids,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_vision_patches=config.max_vision_patches,
        )
        self.on_step: Callable[[StepStats], None] | None = None  # called after every step, for who measures
        # There is nothing to overlap where launching waits: for values, or on a CPU for all that is computed.
        self._looks_ahead = device.type == "cuda" and self.attention.in_graphs
        self._ahead: _Launched | None = None  # the next step, where it was launched before this one's tokens were known
        self._request_numbers, self._unseeded = count(), count()
        self._exited = False
        atexit.register(_exit_if_alive, weakref.ref(self))
        if not config.skip_warmup:
            self.warmup_model()

    def add_request(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        pixel_values: Tensor | SequenceOf[Tensor] | None = None,
        image_grid_thw: Tensor | SequenceOf[SequenceOf[int]] | None = None,
        vision_placeholders: SequenceOf[tuple[int, int]] | None = None,
        image_digests: SequenceOf[bytes] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        follow_text: bool = False,
    ) -> str:
        """Queue a request and return its id; raises ValueError for one that can never run.

        Args:
            prompt: text, or token ids with the image placeholders already expanded.
            pixel_values: (P, patch_dim) of all pictures packed, or one tensor each; uint8 patches or normalised floats.
            image_grid_thw: (num_images, 3), in patches.
            vision_placeholders: (offset, length) of each picture's tokens; found in the prompt where not given.
            image_digests: 16 bytes that stand for each picture in the caches; computed where not given.
            priority: lower runs first; among equals, the earlier arrival.
            cache_salt: prefix cache entries are shared only among requests with the same salt.
            follow_text: keep the text of each answer while it forms, in `Sequence.answer_text`.
        """
        self._refuse_after_exit()
        params = sampling_params or SamplingParams()
        _check_types(
            sampling_params=(params, SamplingParams),
            request_id=(request_id, str | None),
            cache_salt=(cache_salt, str | None),
            priority=(priority, int),
            arrival_time=(arrival_time, float | int | None),
        )
        request_id = self.new_request_id() if request_id is None else request_id
        if request_id in self.scheduler.groups:
            raise ValueError(f"request_id {request_id!r} is already in flight")
        token_ids = self._token_ids(prompt)
        vision = VisionInputs.from_tensors(
            self.model_config, token_ids, pixel_values, image_grid_thw, vision_placeholders, image_digests
        )
        self._refuse_what_never_fits(token_ids, vision)
        merge_size = self.model_config.vision.spatial_merge_size if self.model_config.vision else 1
        positions, delta = mrope_positions(
            len(token_ids), vision.vision_placeholders, vision.image_grid_thw, merge_size
        )
        arrival_time = time.time() if arrival_time is None else arrival_time
        seed = f"{self.config.seed}:{next(self._unseeded)}" if params.seed is None else str(params.seed)
        seqs = [
            Sequence(
                token_ids,
                params,
                request_id=request_id,
                block_size=self.block_size,
                seed=xxhash.xxh64_intdigest(f"{seed}:{i}".encode()),
                vision=vision,
                positions=positions,
                mrope_position_delta=delta,
                priority=priority,
                cache_salt=cache_salt,
                arrival_time=arrival_time,
                answer_text=AnswerText(self.tokenizer, params.stop) if params.stop or follow_text else None,
            )
            for i in range(params.n)
        ]
        self.scheduler.add(SequenceGroup(seqs))
        return request_id

    def new_request_id(self) -> str:
        """An id that no request in flight has, for one that names none."""
        ids = (f"auto-{number}" for number in self._request_numbers)
        return next(request_id for request_id in ids if request_id not in self.scheduler.groups)

    def step(self) -> tuple[list[RequestOutput], int]:
        """Run one batch; return the requests that finished in it and the number of tokens computed.

        On a GPU, a next batch that can be foreseen is launched before this one's tokens are waited for, so that the
        device computes while the host commits this step and schedules the one after. If several sequences run out of
        memory together, none is lost: they compute again, half as many at once. If one does alone, or the device fails
        in another way, the requests of this batch finish with `error` and the engine lives on.
        """
        self._refuse_after_exit()
        with current_device(self.model_runner.device):
            return self._step()

    def _step(self) -> tuple[list[RequestOutput], int]:
        try:
            launched = self._ahead or self._launch_next()
            self._ahead = self._launch_ahead(launched)
            finished = self._commit(launched)
        except BaseException:  # an interrupt: what was scheduled has not been computed
            self._ahead = None
            self.scheduler.preempt_all()
            raise
        outputs = [self._output(group) for group in finished]
        if self.on_step is not None:
            if self._ahead is None:
                launched.watch.mark("commit")
            self.on_step(step_stats(launched.scheduled, self.scheduler, launched.watch.seconds()))
        self._forget_ahead_if_idle()
        return outputs, launched.scheduled.num_tokens

    def _launch_next(self) -> _Launched:
        watch = Stopwatch(self.model_runner.device)
        return self._launch(self.scheduler.schedule(), watch)

    def _launch_ahead(self, running: _Launched) -> _Launched | None:
        """Launch the step after one whose tokens are not known yet; None where it cannot be foreseen."""
        if not self._looks_ahead or running.sampled is None or not running.sampled.lets_next_launch:
            return None
        watch = Stopwatch(self.model_runner.device)
        scheduled = self.scheduler.schedule_ahead(running.scheduled)
        return None if scheduled is None else self._launch(scheduled, watch, running.sampled)

    def _launch(self, scheduled: Schedule, watch: Stopwatch, before: Sampled | None = None) -> _Launched:
        """Pack, run and sample what was scheduled, on ids that the step before is sampling if there is one.

        Nothing here waits for the device. It does what it is given in order, so a step may overwrite what those before
        it read: the buffers of CUDA graphs, and blocks of sequences that have ended in the meantime.
        """
        watch.mark("schedule")
        if not scheduled.chunks:
            return _Launched(scheduled, watch)
        device, input_ids = self.model_runner.device, None if before is None else before.input_ids
        try:
            batch = build_batch(scheduled, self.block_size, device, input_ids)
            watch.mark("pack")
            logits = self.model_runner.run(batch, self.encoder_cache, watch)
            seqs = [chunk.seq for chunk in scheduled.chunks if chunk.samples]
            sampled = self.sampler(logits, seqs, 0 if before is None else 1)
            watch.mark("sampling")
        except (RuntimeError, MemoryError) as error:
            return _Launched(scheduled, watch, error=error.with_traceback(None))  # a traceback would hold the tensors
        return _Launched(scheduled, watch, sampled)

    def _commit(self, launched: _Launched) -> list[SequenceGroup]:
        """Wait for a step's tokens and write them down; return the requests that finished."""
        error = launched.error
        try:
            tokens = launched.sampled.tokens() if launched.sampled is not None else []
        except (RuntimeError, MemoryError) as raised:
            error = raised.with_traceback(None)
        if error is None:
            return self.scheduler.postprocess(launched.scheduled, tokens)
        if len(launched.scheduled.chunks) > 1 and _is_out_of_memory(error):
            self._halve(len(launched.scheduled.chunks), error)
            return []
        return self._fail(launched.scheduled, error)

    def _forget_ahead_if_idle(self) -> None:
        """A step that is computed for sequences that have all ended need not be waited for."""
        if self.scheduler.is_finished():
            self._ahead = None

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at any moment and return what it has so far; None if it is unknown or has finished."""
        group = self.scheduler.abort_seq_group(request_id, FinishReason.ABORTED)
        self._forget_ahead_if_idle()
        return None if group is None else self._output(group)

    def completion(self, seq: Sequence) -> CompletionOutput:
        """The answer of a sequence that has finished."""
        stop_at = seq.answer_text.stop_at if seq.answer_text and seq.finish_reason is FinishReason.STOP else None
        wants_logprobs = seq.sampling_params.logprobs is not None
        return CompletionOutput(
            text=self.tokenizer.decode(seq.completion_token_ids, skip_special_tokens=True)
            if stop_at is None
            else seq.answer_text.text[:stop_at],
            token_ids=seq.completion_token_ids,
            finish_reason=seq.finish_reason.value,
            cumulative_logprob=seq.cumulative_logprob if wants_logprobs else None,
            logprobs=seq.logprobs if wants_logprobs else None,
        )

    def is_finished(self) -> bool:
        """Whether nothing is waiting or running."""
        return self.scheduler.is_finished()

    def warmup_model(self) -> float:
        """Run a prefill (with a picture, if the model sees) and a decode; return the seconds, which are logged too."""
        start = time.perf_counter()
        multimodal, token_ids = {}, [0] * max(1, min(16, self.max_model_len - 2))
        vision = self.model_config.vision
        if vision is not None and len(token_ids) >= 4 and self.encoder_cache.fits(4):
            side = 2 * vision.spatial_merge_size
            multimodal["pixel_values"] = torch.zeros(side * side, vision.patch_dim, dtype=torch.uint8)
            multimodal["image_grid_thw"] = [(1, side, side)]
            token_ids[:4] = [self.model_config.image_token_id] * 4
        request_id = self.add_request(
            token_ids, SamplingParams(max_tokens=2, ignore_eos=True, seed=0), cache_salt="warm-up", **multimodal
        )
        while request_id in self.scheduler.groups:
            for output in self.step()[0]:
                if output.error is not None:
                    raise RuntimeError(f"warm-up failed: {output.error}")
        seconds = time.perf_counter() - start
        logger.info("warm-up took %.2f s", seconds)
        return seconds

    def exit(self) -> None:
        """Abort what is in flight and free the device's memory; safe to call twice, and called at interpreter exit."""
        if self._exited:
            return
        self._exited = True
        for request_id in list(self.scheduler.groups):
            self.abort_request(request_id)
        device = self.model_runner.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # with a step that was launched ahead, for requests that have ended
        del self.model_runner, self.encoder_cache, self.scheduler.encoder_cache
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _refuse_after_exit(self) -> None:
        if self._exited:
            raise RuntimeError("the engine has exited; make a new one")

    def _token_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            prompt = tokenize(self.tokenizer, prompt)
        elif not isinstance(prompt, list | tuple):
            raise ValueError(f"prompt must be a string or a list of token ids, not {type(prompt).__name__}")
        if not prompt:
            raise ValueError("prompt is empty; it needs at least one token")
        vocab_size = self.model_config.vocab_size
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ValueError(f"prompt has {token_id!r}, token ids are integers in [0, {vocab_size})")
        return list(prompt)

    def _refuse_what_never_fits(self, token_ids: list[int], vision: VisionInputs) -> None:
        if len(token_ids) >= self.max_model_len:
            of_images = f" ({vision.num_tokens} of them from images)" if vision.num_tokens else ""
            raise PromptTooLong(
                f"prompt has {len(token_ids)} tokens{of_images}, max_model_len is {self.max_model_len} including the "
                f"answer; shorten it{', lower max_pixels' if of_images else ''} or raise max_model_len"
            )
        for i, (_, length) in enumerate(vision.vision_placeholders):
            if not self.encoder_cache.fits(length):
                needed = length * self.encoder_cache.bytes_per_row
                raise ValueError(
                    f"image {i}: has {length} tokens, which take {needed} bytes of the encoder cache; "
                    f"encoder_cache_bytes is {self.encoder_cache.capacity_bytes}; raise it or lower max_pixels"
                )

    def _check_image_config(self, folder: Path) -> None:
        """The processor and the ViT must agree on what a patch is."""
        image, vision = self.image_config, self.model_config.vision
        if vision is None:
            return
        cut = (image.patch_size, image.temporal_patch_size, image.merge_size)
        wanted = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        if cut != wanted:
            raise ValueError(
                f"{folder}: the picture settings have (patch_size, temporal_patch_size, merge_size) {cut}, "
                f"vision_config needs {wanted}"
            )

    def _resolve_max_model_len(self) -> int:
        """The user's choice or the checkpoint's; a default is cut to what the KV cache can hold of one sequence."""
        limit, asked = self.model_config.max_position_embeddings, self.config.max_model_len
        capacity = self.model_runner.num_blocks * self.block_size
        if asked is not None and asked > limit:
            raise ValueError(f"max_model_len is {asked}, the checkpoint was made for at most {limit} positions")
        if asked is not None and asked > capacity:
            raise ValueError(
                f"max_model_len is {asked}, but the KV cache holds {capacity} tokens "
                f"({self.model_runner.num_blocks} blocks of {self.block_size}); lower it"
            )
        if asked is None and capacity < limit:
            logger.warning(
                "max_model_len is %d, not the checkpoint's %d: more does not fit the KV cache", capacity, limit
            )
        return asked or min(limit, capacity)

    def _halve(self, num_seqs: int, error: RuntimeError | MemoryError) -> None:
        """Take back a step of so many sequences that ran out of memory, and what was launched behind it."""
        self._ahead = None
        self.scheduler.halve(num_seqs)
        logger.warning(
            "a step of %d sequences ran out of memory; they compute again, and at most %d run at once from now on, "
            "one more after every %d steps: %r",
            *(num_seqs, self.scheduler.seq_limit, RECOVERY_STEPS, error),
        )
        if self.model_runner.device.type == "cuda":
            torch.cuda.empty_cache()  # free memory in pieces of the wrong size serves nobody

    def _fail(self, scheduled: Schedule, error: RuntimeError | MemoryError) -> list[SequenceGroup]:
        logger.error("a step failed: %s", error)
        reason = f"the step failed: {type(error).__name__}: {error}"
        alive = [chunk.seq for chunk in scheduled.chunks if not chunk.seq.is_finished]
        request_ids = dict.fromkeys(seq.request_id for seq in alive)  # each once, in order
        return [self.scheduler.abort_seq_group(request_id, FinishReason.ERROR, reason) for request_id in request_ids]

    def _output(self, group: SequenceGroup) -> RequestOutput:
        leader = group.leader
        return RequestOutput(
            request_id=group.request_id,
            completions=[self.completion(seq) for seq in group.seqs],
            num_prompt_tokens=leader.num_prompt_tokens,
            num_cached_tokens=leader.num_cached_tokens,
            num_image_tokens=leader.vision.num_tokens,
            error=group.error,
            arrival_time=leader.arrival_time,
            first_token_time=leader.first_token_time,
            finish_time=time.time(),
        )


def _uses_graphs(config: EngineConfig, device: torch.device, attention: type[AttentionBackend]) -> bool:
    return device.type == "cuda" and attention.in_graphs and not config.enforce_eager


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    # Torch's allocator on a CPU, pinned memory and Triton have no class of their own for it.
    words = ("DefaultCPUAllocator: ", "out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(each in str(error) for each in words)


def _check_types(**given: tuple[Any, Any]) -> None:
    """Each argument is a (value, type or union of types) pair."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r:.100}, must be {getattr(kind, '__name__', kind)}")


def _load_tokenizer(folder: Path):
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a broken or missing tokenizer file makes the library raise
        raise ValueError(f"{folder} has no tokenizer that transformers can load: {error}") from error
    template = folder / "chat_template.json"
    if tokenizer.chat_template is None and template.is_file():
        try:
            tokenizer.chat_template = json.loads(template.read_text(encoding="utf-8"))["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{template} is damaged: {error!r}; download it again") from None
    return tokenizer


def _exit_if_alive(ref: "weakref.ref[LLMEngine]") -> None:
    engine = ref()
    if engine is not None:
        engine.exit()
