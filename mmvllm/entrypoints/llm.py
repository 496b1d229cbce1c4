"""`LLM` runs inference with one model from Python, from one or several threads."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from mmvllm.config import EngineArgs, EngineConfig
from mmvllm.engine.gc_utils import collect_everything
from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.entrypoints.metrics import Metric, read_metrics
from mmvllm.entrypoints.request_queue import (
    AdmissionWindow,
    Params,
    Prefetcher,
    Prepare,
    Request,
    RequestPreparer,
    Unprefetched,
    as_request,
    check_lengths,
    check_processor_kwargs,
    naming_request,
    params_for,
    request_options,
    slowest_media,
)
from mmvllm.entrypoints.request_stream import (
    Events,
    Plan,
    RequestSource,
    RequestStream,
    StreamEvent,
    one_each,
    output_of,
)
from mmvllm.entrypoints.scoring import ContinuationReader, Scores
from mmvllm.entrypoints.tracing import check_endpoint, make_tracer
from mmvllm.errors import ParameterError, RequestError, RequestsAborted
from mmvllm.inputs import EngineInput
from mmvllm.lora import LoRARequest
from mmvllm.models.folder import model_name
from mmvllm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Delta,
    EmbeddingOutput,
    RequestOutput,
    ScoreOutput,
)
from mmvllm.pooling_params import PoolingParams
from mmvllm.processors.chat.requests import PROMPT_KEYS
from mmvllm.sampling_params import BeamSearchParams, SamplingParams
from mmvllm.scheduler.sequence import SequenceGroup
from mmvllm.utils.text import counted, shown


class LLM:
    """A vision-language model with its tokenizer, processor and engine. Threads that share it take turns.

    Args:
        model: a local checkpoint folder or a hub id; None is the small bundled model.
        processor: None for mmvllm's processor, or an object with the interface of transformers' processors.
        video_backend: "pyav", or "qwen-vl-utils" to read videos from a path or a URL with that package, which must be
            installed.
        mm_processor_kwargs: default arguments for the image and video processors, such as {"max_pixels": 262144}; the
            arguments of a request take precedence.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that receives a trace of each request (OTLP over HTTP).
        engine_args: fields of `mmvllm.EngineConfig`, which documents them.

    Use it as a context manager, or call `exit` to free its memory.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        processor: Any = None,
        video_backend: str = "pyav",
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        otlp_traces_endpoint: str | None = None,
        **engine_args: Any,
    ):
        check_endpoint(otlp_traces_endpoint)
        check_processor_kwargs(mm_processor_kwargs)
        self.engine = LLMEngine(model, EngineConfig.from_arguments("LLM", model, **engine_args))
        self.model = model_name(model)
        self.tokenizer, self.device = self.engine.tokenizer, self.engine.model_runner.device
        self._preparer = RequestPreparer(self.engine, processor, video_backend, mm_processor_kwargs)
        # As many requests may wait in the engine as run, so that a step never lacks work.
        self.admission = AdmissionWindow(2 * self.engine.config.max_num_seqs)
        self._tracer = make_tracer(otlp_traces_endpoint, self.model)
        if self._tracer is not None:
            self.engine.on_finished = self._trace
        self._is_asleep = False

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLM":
        """Create an LLM from vLLM-style arguments."""
        return cls(**asdict(args))

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, under vLLM's name."""
        return self.engine

    @property
    def processor(self) -> Prepare:
        """The function that converts a chat request to an `EngineInput`."""
        return self._preparer.processor

    @processor.setter
    def processor(self, prepare: Prepare) -> None:
        self._preparer.processor = prepare

    def get_tokenizer(self):
        """Return the tokenizer, like vLLM's method."""
        return self.tokenizer

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return mmvllm's defaults, overridden by the checkpoint's generation_config.json and then by `changes`.

        They apply only if passed as `sampling_params`; calls without sampling parameters are greedy. Raises ValueError
        for a wrong value, and TypeError for an unknown name.
        """
        return self.engine.default_sampling_params(**changes)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return `default_sampling_params()`, under vLLM's name."""
        return self.default_sampling_params()

    def generate(
        self,
        prompts: Request | list[Request],
        sampling_params: Params = None,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
        *,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate completions of raw prompts, without a chat template; outputs come in the order of the prompts.

        A prompt is a string, token ids (a list, an array or a tensor), or a dict in vLLM's format: `prompt` or
        `prompt_token_ids`, with `multi_modal_data` such as {"image": image or [image, ...]}. `lora_request` is one
        adapter for all prompts, or a list with one per prompt. `priority` has one number per prompt; lower numbers
        begin first. `use_tqdm` shows a progress bar; None, the default of most methods, shows one on a terminal and in
        a notebook.

        Raises ValueError that names a bad prompt's index, or RuntimeError if the device fails; both abort all prompts.
        """
        try:
            prompts = _with_priorities(_with_adapters(_as_prompts(prompts), lora_request), priority)
            check_lengths(sampling_params, len(prompts))
            outputs = dict(_progress(self._generate(prompts, sampling_params), len(prompts), use_tqdm))
        except RequestError as error:
            error.noun = "prompt"
            raise
        return _in_order(outputs, "prompt", "raise")

    def _generate(self, prompts: list[Request], sampling_params: Params) -> Events:
        """Yield the outputs of prompts; prompts without media all enter the engine before its first step."""
        source, window = Unprefetched(prompts, self._preparer.prepare), AdmissionWindow(len(prompts))
        if any(map(slowest_media, prompts)):
            source, window = self._prefetch(prompts, self._preparer.prepare), None
        return self._events(source, one_each(sampling_params), window, noun="prompt")

    def generate_multimodal(
        self,
        requests: dict | Iterable[dict],
        sampling_params: Params = None,
        processor: Any = None,
        use_tqdm: bool | None = None,
        on_error: str = "raise",
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer chat requests with images and videos; outputs come in the order of the requests.

        Args:
            requests: one dict or several, with `messages` (chat format, image parts anywhere), with `text` and
                `images`, or in the format of `generate`. Optional keys are `min_pixels`, `max_pixels`, `request_id`,
                `priority`, `cache_salt`, `lora_request`, `trace_headers` (of W3C Trace Context) and `sampling_params`.
                Requests with lower priority values begin first. Special tokens in messages are text, unless the
                request has `allow_special_tokens`. `chat_template_kwargs` are arguments of the chat template, such as
                {"enable_thinking": False}.
            sampling_params: one for all requests, or a list with one per request; a request's own take precedence.
            processor: replaces the LLM's processor for this call.
            on_error: "raise" raises ValueError that names a bad request's index (RuntimeError if the device fails), and
                aborts the other requests; "return" gives a bad request an output with `error` and continues.
            lora_request: the adapter of requests that name none, or a list with one per request.

        A request that is aborted meanwhile has an output with finish_reason "aborted" and the text so far. With
        "raise", RequestsAborted is raised once the others have finished, with the outputs of all requests.
        """
        requests = _with_adapters(_as_list(requests, "request"), lora_request)
        check_lengths(sampling_params, len(requests))
        source = self._prefetch_in_order(requests, self._preparing(processor))
        events = self._events(source, one_each(sampling_params), on_error=on_error)
        return _in_order(dict(_progress(events, len(requests), use_tqdm)), "request", on_error)

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: Params = None,
        processor: Any = None,
        use_tqdm: bool | None = None,
        on_error: str = "raise",
        allow_special_tokens: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict] | None = None,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        Special tokens in the messages are text, unless `allow_special_tokens` is True. `chat_template_kwargs` are
        arguments of the chat template, such as `enable_thinking`. `tools` are the functions that the model may call, in
        OpenAI's format; `read_tool_calls` of `mmvllm.processors.chat.tool_calls` finds the calls in a text.
        With `continue_final_message`, the model continues the final message instead of beginning an answer;
        `add_generation_prompt=False` leaves out the beginning of an answer. `chat_template` is a Jinja template that
        replaces the checkpoint's. `mm_processor_kwargs` are arguments for the image and video processors. The other
        arguments are as for `generate_multimodal`.
        """
        if not isinstance(messages, list | tuple):
            raise RequestError(
                f"messages must be a list of messages, or of such lists, got {type(messages).__name__}",
                param="messages",
                value=messages,
            )
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        keys = {"allow_special_tokens": allow_special_tokens, "chat_template_kwargs": chat_template_kwargs}
        keys |= {"tools": tools, "chat_template": chat_template, "mm_processor_kwargs": mm_processor_kwargs}
        keys |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        requests = [{"messages": conversation} | keys for conversation in conversations]
        return self.generate_multimodal(requests, sampling_params, processor, use_tqdm, on_error, lora_request)

    def stream_multimodal(
        self,
        requests: dict | Iterable[dict],
        sampling_params: Params = None,
        processor: Any = None,
        use_tqdm: bool | None = False,
        on_error: str = "raise",
        stream: bool = False,
    ) -> Iterator[RequestOutput] | Iterator[Delta]:
        """Yield each request's output when it finishes, like `generate_multimodal`; `requests` may be endless.

        With `stream=True`, yield a `Delta` for the new text of a completion instead; the last delta of a request has
        its output.

        A separate thread reads a bounded number of requests ahead, so an iterable must not change what it has yielded,
        such as an image's array. Outputs come in any order; a `request_id` tells requests apart. A list of requests
        begins in the order of priority. For any other iterable, priorities apply among the requests that the engine
        holds. Closing the generator aborts the remaining requests.
        """
        requests = [requests] if isinstance(requests, dict) else requests
        total = len(requests) if hasattr(requests, "__len__") else None
        if total is not None:
            check_lengths(sampling_params, total)
        prefetch = self._prefetch_in_order if isinstance(requests, list | tuple) else self._prefetch
        source = prefetch(requests, self._preparing(processor))
        events = self._events(source, one_each(sampling_params), streams=stream, on_error=on_error)
        aborted = {}
        for index, event in _progress(events, total, use_tqdm):
            if (output := output_of(event)) is not None and _is_aborted(output):
                aborted[index] = output
            yield event
        if aborted and on_error == "raise":
            raise RequestsAborted(_aborted_message("request", aborted), [*aborted.values()])

    def beam_search(
        self,
        prompts: Request | list[Request],
        params: BeamSearchParams,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
        use_tqdm: bool | None = False,
    ) -> list[BeamSearchOutput]:
        """Return the beams of each prompt in vLLM's classes; prompts and errors are as for `generate`."""
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}")
        outputs = self.generate(prompts, params.sampling_params(), use_tqdm, lora_request)
        return [BeamSearchOutput([self._hypothesis(out, one) for one in out.completions]) for out in outputs]

    def _hypothesis(self, output: RequestOutput, completion: CompletionOutput) -> BeamSearchSequence:
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        text = self.tokenizer.decode(tokens)
        return BeamSearchSequence(tokens, text, completion.cumulative_logprob, completion.finish_reason)

    def embed(
        self,
        requests: Request | Iterable[Request],
        *,
        pooling: str = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        use_tqdm: bool | None = None,
        on_error: str = "raise",
    ) -> list[EmbeddingOutput]:
        """Return an embedding of each request from the decoder's last hidden states, in the order of the requests.

        Args:
            requests: one or several: strings or token ids without a chat template, or dicts as for
                `generate_multimodal`, with text, images and videos.
            pooling, normalize, dimensions: see `PoolingParams`. "last" uses the prefix cache, while "mean" computes
                all tokens.
            on_error: see `generate_multimodal`.
        """
        params = PoolingParams(pooling=pooling, normalize=normalize, dimensions=dimensions)
        requests = _as_list(requests, "request")
        events = self._events(
            self._prefetch(requests, self._preparer.prepare), one_each(None, pooling=params), on_error=on_error
        )
        outputs = _in_order(dict(_progress(events, len(requests), use_tqdm)), "request", on_error)
        return [EmbeddingOutput.of(output) for output in outputs]

    def encode(
        self, prompts: Request | list[Request], *, pooling_task: str = "embed", use_tqdm: bool | None = None
    ) -> list[EmbeddingOutput]:
        """Return an embedding of each prompt with the defaults of `embed`, under vLLM's name.

        Raises ParameterError for a `pooling_task` other than "embed".
        """
        if pooling_task != "embed":
            raise ParameterError("pooling_task", pooling_task, "'embed', the only task of this engine")
        return self.embed(prompts, use_tqdm=use_tqdm)

    def score(
        self, requests: Request | Iterable[Request], continuations: Sequence[Any], *, use_tqdm: bool | None = None
    ) -> list[ScoreOutput]:
        """Return log-probabilities of given continuations, for multiple choice, in the order of the requests.

        Args:
            requests: see `embed`.
            continuations: a list of strings or lists of token ids for all requests, or such a list for each request.
                A string is tokenized independently of the prompt.

        The first continuation of a request computes the prompt; the others take it from the prefix cache.
        """
        requests = _as_list(requests, "request")
        reader = ContinuationReader(self.tokenizer, self.engine.media_rules, self.engine.model_config.vocab_size)
        scores, outputs = Scores(reader.read(continuations, len(requests))), {}
        events = self._events(self._prefetch(requests, self._preparer.prepare), scores.plan)
        with _bar(len(requests), use_tqdm) as bar, closing(events):
            for key, event in events:
                if (output := scores.add(key, event)) is not None:
                    outputs[key[0]] = output
                    bar.update()
        return [outputs[index] for index in range(len(requests))]

    def add_request(self, prompt: Request | EngineInput, sampling_params: Params = None, **options: Any) -> str:
        """Queue a request in any form; return its id. See `LLMEngine.add_request` for `options`."""
        self.engine.process.check()
        check_lengths(sampling_params, 1)
        if isinstance(prompt, dict):
            options = request_options(prompt) | {"request_id": prompt.get("request_id")} | options
            params = params_for(sampling_params, 0, prompt.get("sampling_params"))
            prompt = self._preparer.prepare(prompt)
        else:
            params = params_for(sampling_params, 0)
        return self.engine.add_request(prompt, params, **options)

    def step(self) -> tuple[list[RequestOutput], int]:
        """Run one step; return the outputs of requests that finished in it, and the number of tokens computed."""
        return self.engine.step()

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Abort a request and return its output so far; None if it is unknown or has finished."""
        return self.engine.abort_request(request_id)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache: later prompts are computed from their beginning. Return True, like vLLM's method."""
        self.engine.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and caches until `wake_up` reloads the weights from their files.

        `level` is accepted for compatibility with vLLM and has no effect. Raises RuntimeError while requests are in
        flight. Until `wake_up`, all methods that compute raise RuntimeError.
        """
        with self.engine.lock:
            if self._is_asleep:
                return
            self.engine.check_alive()
            if not self.engine.is_finished():
                raise RuntimeError(f"{len(self.engine.scheduler.groups)} requests are in flight; finish or abort them")
            self.engine.exit("the engine is asleep; call wake_up first")
            self._is_asleep = True
            collect_everything(self.device)

    def wake_up(self) -> None:
        """Reload the model after `sleep`; do nothing if it is awake.

        Raises the errors of the constructor, for example if memory is short, and may then be called again.
        """
        with self.engine.lock:
            if self._is_asleep:
                self.engine = self.engine.reload()
                self.engine.on_finished = None if self._tracer is None else self._trace
                self._is_asleep = False

    def get_metrics(self) -> list[Metric]:
        """Return the engine's gauges and counters under vLLM's names, such as "vllm:prefix_cache_hits".

        Any thread may call it. The times of a request are in `RequestOutput.metrics`.
        """
        stats = replace(self.engine.stats(), num_released=int(self._is_asleep))
        return read_metrics(stats, {"model_name": self.model, "engine": "0"})

    def exit(self) -> None:
        """Free the engine's memory once a step in another thread has ended; safe to call twice."""
        if not self.engine.process.is_here:
            return
        self._is_asleep = False
        self.engine.exit()
        if self._tracer is not None:
            self._tracer.shutdown()

    def _trace(self, group: SequenceGroup) -> None:
        self._tracer.record(group.sampling_params, group.trace_headers, group.output, adapter=group.adapter_name)

    def stream_prepared(self, source: RequestSource, plan: Plan, is_stopped: Callable[[], bool]) -> Events:
        """Yield (key, output) for requests that the caller has prepared; an output may have an `error`.

        See `RequestStream` for the arguments and keys; the output is None for a request without a plan.
        """
        return self._events(source, plan, on_error="return", is_stopped=is_stopped)

    def _events(
        self, source: RequestSource, plan: Plan, window: AdmissionWindow | None = None, **options: Any
    ) -> Events:
        return RequestStream(self.engine, source, plan, window or self.admission, **options).events()

    def _prefetch(
        self, requests: Iterable[Request], prepare: Prepare, indices: Iterable[int] | None = None
    ) -> Prefetcher:
        self.engine.process.check()
        return Prefetcher(requests, prepare, max_requests=self.admission.max_requests, indices=indices)

    def _preparing(self, processor: Any) -> Prepare:
        """Return the function that prepares chat requests with a call's processor; None is the LLM's processor."""
        return self._preparer.preparing(self.processor if processor is None else self._preparer.adapt(processor))

    def _prefetch_in_order(self, requests: Sequence[dict], prepare: Prepare) -> Prefetcher:
        """Prepare requests in the order of their priority."""
        order = sorted(range(len(requests)), key=lambda index: _priority(requests[index]))
        return self._prefetch([requests[index] for index in order], prepare, order)


def _as_prompts(prompts: Any) -> list[Request]:
    """Return one prompt or several, in any form that `generate` takes, as a list; raises RequestError."""
    return [_as_prompt(index, prompt) for index, prompt in enumerate(_as_list(prompts, "prompt"))]


def _as_list(requests: Any, noun: str) -> list[Request]:
    """Return one request or several as a list."""
    if isinstance(requests, str | bytes | Mapping) or getattr(requests, "ndim", 2) < 2:
        requests = [requests]
    if not isinstance(requests, Iterable):
        raise RequestError(f"{noun}s must be a {noun} or a list of {noun}s, got {type(requests).__name__}")
    requests = list(requests)
    is_one = requests and (isinstance(requests[0], int) or getattr(requests[0], "ndim", 1) == 0)
    return [requests] if is_one else requests


def _as_prompt(index: int, prompt: Any) -> Request:
    with naming_request(index):
        if isinstance(prompt, dict):
            if unknown := sorted(map(str, prompt.keys() - {*PROMPT_KEYS, "cache_salt", "lora_request"})):
                raise RequestError(f"prompt has unknown keys {', '.join(unknown)}; known: {', '.join(PROMPT_KEYS)}")
            return prompt
        if isinstance(prompt, str | list | tuple) or hasattr(prompt, "shape"):
            return prompt
        raise RequestError(f"prompt must be a string or a list of token ids, or a dict, got {type(prompt).__name__}")


def _with_adapters(requests: list[Any], lora_request: Any) -> list[Any]:
    """Add a call's adapters to requests that name none; raises RequestError for a wrong number of adapters."""
    if lora_request is None:
        return requests
    adapters = lora_request if isinstance(lora_request, list | tuple) else [lora_request] * len(requests)
    _check_one_each("lora_request", adapters, len(requests), "request")
    pairs = zip(map(as_request, requests), adapters, strict=True)
    return [_with_adapter(request, adapter) for request, adapter in pairs]


def _with_adapter(request: Any, adapter: Any) -> Any:
    is_lacking = isinstance(request, dict) and request.get("lora_request") is None
    return {**request, "lora_request": adapter} if is_lacking and adapter is not None else request


def _check_one_each(name: str, values: Any, number: int, noun: str) -> None:
    if not isinstance(values, list | tuple) or len(values) != number:
        got = f"{len(values)} values" if isinstance(values, list | tuple) else shown(values)
        required = f"must be a list with one value for each of {counted(number, noun)}"
        raise RequestError(f"{name} {required}, got {got}", param=name)


def _with_priorities(prompts: list[Request], priorities: list[int] | None) -> list[Request]:
    """Return prompts with these priorities; raises RequestError for a wrong number of priorities."""
    if priorities is None:
        return prompts
    _check_one_each("priority", priorities, len(prompts), "prompt")
    return [as_request(prompt) | {"priority": own} for prompt, own in zip(prompts, priorities, strict=True)]


def _priority(request: Any) -> int:
    """Return the priority by which requests are ordered; a bad value counts as 0 and is refused later."""
    priority = request.get("priority") if isinstance(request, dict) else None
    return priority if isinstance(priority, int) else 0


def _is_aborted(output: RequestOutput) -> bool:
    return any(completion.finish_reason == "aborted" for completion in output.completions)


def _aborted_message(noun: str, indices: Iterable[int]) -> str:
    return "; ".join(f"{noun} {index}: aborted" for index in indices)


def _in_order(outputs: dict[int, RequestOutput], noun: str, on_error: str) -> list[RequestOutput]:
    ordered = [outputs[index] for index in range(len(outputs))]
    aborted = [index for index, output in enumerate(ordered) if _is_aborted(output)]
    if aborted and on_error == "raise":
        raise RequestsAborted(_aborted_message(noun, aborted), ordered)
    return ordered


def _bar(total: int | None, use_tqdm: bool | None) -> tqdm:
    """Return a progress bar; None shows one on a terminal and in a notebook."""
    disable = None if use_tqdm is None else not use_tqdm
    return tqdm(total=total, unit="request", dynamic_ncols=True, disable=disable)


def _progress(events: Events, total: int | None, use_tqdm: bool | None) -> Iterator[tuple[int, StreamEvent | None]]:
    """Yield (index of the request, event), with a progress bar and token rates."""
    bar = _bar(total, use_tqdm)
    num_input = num_output = 0
    with bar, closing(events):
        for (index, _), event in events:
            yield index, event
            if (output := output_of(event)) is None:
                continue
            num_input += output.num_prompt_tokens
            num_output += sum(len(completion.token_ids) for completion in output.completions)
            if seconds := bar.format_dict["elapsed"]:
                bar.set_postfix_str(
                    f"in {num_input / seconds:.0f} tok/s, out {num_output / seconds:.0f} tok/s", refresh=False
                )
            bar.update()
