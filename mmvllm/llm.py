"""`LLM`: the offline front door."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mmvllm.config import EngineConfig
from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.models.weights import model_name
from mmvllm.outputs import RequestOutput
from mmvllm.prefetch import MAX_BYTES, Prefetcher, Prepared
from mmvllm.processors.chat import ForeignProcessor, Processor
from mmvllm.processors.image import ImageProcessor
from mmvllm.sampling_params import SamplingParams

Params = SamplingParams | list[SamplingParams] | None


class LLM:
    """A Qwen2-VL model and everything that serves it, for use from Python; threads that share it take turns.

    Args:
        model: a local checkpoint folder or a hub id; None is the small bundled model.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        dtype: "auto" (the checkpoint's; float32 for a float16 one on a CPU), "float32", "float16" or "bfloat16".
        load_format: "auto" or "safetensors"; "dummy" makes random weights from config and tokenizer alone.
        max_model_len: longest prompt with answer, in tokens; by default the checkpoint's, or what the KV cache holds.
        max_num_seqs: sequences that run at once; fewer for a while after a batch ran out of memory.
        max_num_batched_tokens: tokens computed in one step; longer prompts are computed in chunks.
        max_vision_patches: patches encoded in one step; one larger picture goes alone.
        kvcache_block_size: tokens in a KV block, the unit of sharing; by default 256 where flash-attn, which takes no
            fewer, serves the decoder, and 16 elsewhere.
        num_kvcache_blocks: by default what `gpu_memory_utilization` leaves room for, or `cpu_kvcache_bytes` on a CPU,
            but no more than `max_num_seqs` sequences of full length use.
        gpu_memory_utilization: share of the GPU's memory to use for everything, in (0, 1].
        cpu_kvcache_bytes: size of the KV cache on a CPU.
        encoder_cache_bytes: ViT outputs kept on the device; a picture larger than this is refused.
        enable_prefix_caching: share the KV blocks of equal beginnings, pictures included.
        attention_backend: "auto" (flash-attn where it is installed and fits, then Triton, then torch; plain torch on a
            CPU), "flash", "triton" or "torch".
        quantization: "int8" quantises weights once and activations as they come, on a CPU; answers change a little.
        enforce_eager: capture no CUDA graphs for decode steps; starts faster, and launches every kernel by itself.
        skip_warmup: do not run a first batch at start.
        seed: of requests that bring none of their own, and of dummy weights.
    """

    def __init__(self, model: str | Path | None = None, **engine_args: Any):
        known = [field.name for field in fields(EngineConfig)]
        for name in engine_args:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
                raise TypeError(f"LLM has no argument {name!r}{hint}")
        self.engine = LLMEngine(model, EngineConfig(**engine_args))
        self.model = model_name(model)
        self.tokenizer = self.engine.tokenizer
        self.processor = Processor(
            self.tokenizer, ImageProcessor(self.engine.image_config), self.engine.model_config.image_token_id
        )
        self._calls: dict[str, _Call] = {}  # who waits for which request
        self._lock = threading.RLock()

    def generate(
        self,
        prompts: str | list[int] | list[str | list[int]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue raw prompts (strings, or lists of token ids); outputs come in the order of the prompts.

        No chat template is applied. Raises ValueError that names the prompt's index, RuntimeError if the device fails;
        both leave nothing behind.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        call = _Call(self)
        try:
            for index, prompt in enumerate(prompts):
                try:
                    call.add(index, prompt, params_for(sampling_params, index))
                except ValueError as error:
                    raise ValueError(f"prompt {index}: {error}") from error
            outputs = dict(_progress(call.outputs(), len(prompts), use_tqdm))
            for index, output in outputs.items():
                if output.error is not None:
                    raise RuntimeError(f"prompt {index}: {output.error}")
        finally:
            call.abort()
        return [outputs[index] for index in range(len(prompts))]

    def generate_multimodal(
        self,
        requests: Iterable[dict],
        sampling_params: Params = None,
        processor: Any = None,
        use_tqdm: bool = True,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Answer chat requests with pictures; outputs come in the order of the requests.

        Args:
            requests: dicts with `messages` (chat format, image parts anywhere) or with `text` and `images`; optional
                `min_pixels`, `max_pixels`, `request_id`, `priority`, `cache_salt`, `sampling_params`.
            sampling_params: for all, or a list with one per request; a request's own come first.
            processor: None for mmvllm's own, or an object with the interface of transformers' Qwen2-VL processor.
            on_error: "raise" raises ValueError that names the request's index (RuntimeError if the device fails), and
                leaves nothing behind; "return" gives a bad request an output with `error` and leaves the others alone.
        """
        requests = list(requests)
        stream = self.stream_prepared(self._prefetch(requests, processor), sampling_params, on_error)
        outputs = dict(_progress(stream, len(requests), use_tqdm))
        return [outputs[index] for index in range(len(requests))]

    def stream_multimodal(
        self,
        requests: Iterable[dict],
        sampling_params: Params = None,
        processor: Any = None,
        use_tqdm: bool = False,
        on_error: str = "raise",
    ) -> Iterator[RequestOutput]:
        """Like `generate_multimodal`, but yields outputs as they finish, and `requests` may be an endless iterator.

        Requests are taken a bounded number ahead, in a thread of their own. Outputs come in any order; give requests a
        `request_id` to tell them apart. Closing the generator aborts what is left.
        """
        total = len(requests) if hasattr(requests, "__len__") else None
        stream = self.stream_prepared(self._prefetch(requests, processor), sampling_params, on_error)
        for _, output in _progress(stream, total, use_tqdm):
            yield output

    def exit(self) -> None:
        """Free the engine's memory; safe to call twice."""
        self.engine.exit()

    def stream_prepared(
        self,
        prefetcher: Prefetcher,
        sampling_params: Params = None,
        on_error: str = "raise",
        check: Callable[[Prepared], None] | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `stream_multimodal`, for requests that the caller's own prefetcher prepares; yields (index, output).

        `check` sees every request that could be prepared right before the engine gets it, and refuses it by raising
        ValueError. Once `is_stopped`, requests that wait in the engine are dropped, and those that run are finished.
        """
        call = _Call(self)
        try:
            if on_error not in ("raise", "return"):
                raise ValueError(f"on_error is {on_error!r}, must be 'raise' or 'return'")
            while True:
                if is_stopped():
                    call.abort_waiting()
                # Keep the engine fed, but wait for preparation only when there is nothing else to do.
                while self._has_room(call):
                    item = prefetcher.get(wait=not call.indices and not call.finished)
                    if item is None:
                        break
                    try:
                        self._add(call, item, sampling_params, check)
                    except ValueError as error:
                        if on_error == "raise":
                            raise ValueError(f"request {item.index}: {error}") from error
                        yield item.index, self._refused(item, error)
                if not call.indices and not call.finished and prefetcher.is_exhausted:
                    return
                for index, output in call.step():
                    if output.error is not None and on_error == "raise":
                        raise RuntimeError(f"request {index}: {output.error}")
                    yield index, output
        finally:
            prefetcher.close()
            call.abort()

    def _prefetch(self, requests: Iterable[dict], processor: Any) -> Prefetcher:
        prepare = self.processor
        if processor is not None:
            model_config = self.engine.model_config
            prepare = ForeignProcessor(processor, model_config.image_token_id, self.engine.image_config.merge_size)
        return Prefetcher(requests, prepare, max_requests=self.window)

    @property
    def window(self) -> int:
        """Requests in the engine at once: as many again wait there as run, so that a step is never short of work."""
        return 2 * self.engine.config.max_num_seqs

    def _has_room(self, call: "_Call") -> bool:
        """Whether the engine should take another request: by their number, and by the bytes of pictures that wait."""
        with self._lock:  # another thread's step may take requests away meanwhile
            groups = self.engine.scheduler.groups.values()
            held = sum(group.leader.vision.num_bytes for group in groups if not group.has_begun)
        return not call.indices or (len(call.indices) < self.window and held < MAX_BYTES)

    def _add(
        self, call: "_Call", item: Prepared, sampling_params: Params, check: Callable[[Prepared], None] | None
    ) -> None:
        """Hand a prepared request to the engine; raises ValueError for what was wrong, with its preparation too."""
        try:
            prompt = item.prompt.result()
        except ValueError:
            raise
        except Exception as error:  # of a processor that is not ours, or a mistake in ours: the request's own affair
            raise ValueError(f"preparation failed: {type(error).__name__}: {error}") from error
        if check is not None:
            check(item)
        params = params_for(sampling_params, item.index, item.request.get("sampling_params"))
        options = {"request_id": item.request.get("request_id")} | request_options(item.request)
        call.add(item.index, prompt.token_ids, params, **options, **prompt.multimodal)

    def _deliver(self, output: RequestOutput) -> None:
        if call := self._calls.pop(output.request_id, None):
            # In this order: a call that has nothing in flight and nothing finished is over.
            call.finished.append((call.indices[output.request_id], output))
            del call.indices[output.request_id]

    def _refused(self, item: Prepared, error: ValueError) -> RequestOutput:
        own_id = item.request.get("request_id") if isinstance(item.request, dict) else None
        return RequestOutput(request_id=self.engine.new_request_id() if own_id is None else own_id, error=str(error))


class _Call:
    """The requests of one call: those in flight by id, and those that finished since it last looked.

    Several calls may run interleaved, from open generators or from threads; whoever steps the engine delivers to all.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self.indices: dict[str, int] = {}
        self.finished: list[tuple[int, RequestOutput]] = []

    def add(self, index: int, prompt: str | list[int], params: SamplingParams | None, **options: Any) -> None:
        with self.llm._lock:
            request_id = self.llm.engine.add_request(prompt, params, **options)
            self.indices[request_id] = index
            self.llm._calls[request_id] = self

    def step(self) -> list[tuple[int, RequestOutput]]:
        """Run the engine once and take what is finished of this call."""
        with self.llm._lock:
            if not self.finished:
                for output in self.llm.engine.step()[0]:
                    self.llm._deliver(output)
                for request_id in self.indices.keys() - self.llm.engine.scheduler.groups.keys():
                    self.llm._deliver(RequestOutput(request_id, error="aborted"))  # not by us
            finished, self.finished = self.finished, []
        return finished

    def outputs(self) -> Iterator[tuple[int, RequestOutput]]:
        while self.indices or self.finished:
            yield from self.step()

    def abort_waiting(self) -> None:
        """End what the engine has not begun."""
        with self.llm._lock:
            for request_id in [*self.indices]:
                group = self.llm.engine.scheduler.groups.get(request_id)
                if group is not None and not group.has_begun:
                    self.llm.engine.abort_request(request_id)
                    self.llm._calls.pop(request_id)
                    del self.indices[request_id]

    def abort(self) -> None:
        with self.llm._lock:
            for request_id in self.indices:
                self.llm.engine.abort_request(request_id)
                self.llm._calls.pop(request_id)
            self.indices = {}


def request_options(request: dict) -> dict[str, Any]:
    """What a request says of its place in the queue and in the cache, for `LLMEngine.add_request`."""
    return {"priority": request.get("priority") or 0, "cache_salt": request.get("cache_salt")}


def params_for(sampling_params: Params, index: int, own: SamplingParams | dict | None = None) -> SamplingParams:
    """A request's own parameters, else those of the call: one for all, or a list with one per request."""
    params = sampling_params if own is None else own
    if isinstance(params, list | tuple):
        if index >= len(params):
            raise ValueError(f"{len(params)} sampling_params were given, none for this one; give one per request")
        params = params[index]
    if isinstance(params, dict):
        try:
            params = SamplingParams(**params)
        except TypeError as error:
            raise ValueError(f"sampling_params: {error}") from None
    if not isinstance(params, SamplingParams | None):
        raise ValueError(f"sampling_params must be SamplingParams or a dict, not {type(params).__name__}")
    return params or SamplingParams()


def _progress(
    stream: Iterator[tuple[int, RequestOutput]], total: int | None, use_tqdm: bool
) -> Iterator[tuple[int, RequestOutput]]:
    """Pass the stream through, with a progress bar and token rates where there is a terminal."""
    bar = tqdm(total=total, unit="request", dynamic_ncols=True, disable=None if use_tqdm else True)
    num_input = num_output = 0
    with bar, closing(stream):
        for index, output in stream:
            yield index, output
            num_input += output.num_prompt_tokens
            num_output += sum(len(completion.token_ids) for completion in output.completions)
            if seconds := bar.format_dict["elapsed"]:
                bar.set_postfix_str(
                    f"in {num_input / seconds:.0f} tok/s, out {num_output / seconds:.0f} tok/s", refresh=False
                )
            bar.update()
