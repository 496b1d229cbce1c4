"""Prepares requests in worker threads, within an admission window, for `LLM` and `AsyncLLM`.

    request ── RequestPreparer.prepare, in a worker ── EngineInput ── admission window ── engine

Preparation runs ahead of the engine within limits: a number of requests, and `MAX_BYTES` for the media of waiting
requests, beyond which no preparation begins, except of text in `AsyncLLM`. `LLM` prepares an iterable (`Prefetcher`),
and `AsyncLLM` prepares single requests (`PreparationQueue`). Workers are threads, since Pillow, numpy and torch
release the GIL in their loops. A thread may delegate its work to a process (`WorkerPool`).
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from mmvllm.errors import RequestError, without_frames
from mmvllm.inputs import EngineInput, MediaRules, in_pinned_memory
from mmvllm.media.policy import Kind
from mmvllm.processes.pool import NUM_WORKERS, WorkersUnusable
from mmvllm.processors.chat.hf_processor import HFProcessor
from mmvllm.processors.chat.parts import plain_processor_kwargs
from mmvllm.processors.chat.processor import Processor
from mmvllm.processors.chat.requests import media_kinds, parse_request
from mmvllm.processors.images.processor import ImageProcessor, ImageProcessorConfig
from mmvllm.processors.tensors import own_token_ids
from mmvllm.processors.videos.backends import load_with
from mmvllm.processors.videos.load import Load
from mmvllm.processors.videos.processor import VideoProcessor, VideoProcessorConfig
from mmvllm.sampling_params import SamplingParams
from mmvllm.utils.text import counted

# Groups of mm_processor_kwargs: a request with one key of a group replaces all default values of the group.
TOGETHER = ({"fps", "num_frames", "do_sample_frames"}, {"min_pixels", "max_pixels"})
MAX_BYTES = 256 * 1024 * 1024

Request = dict | str | list[int]  # a dict for `parse_request`, or a string or token ids without a template
Params = SamplingParams | dict | list[SamplingParams | dict | None] | None
Prepare = Callable[[dict], EngineInput]


@dataclass(frozen=True, slots=True)
class AdmissionWindow:
    """Limits on the requests that the engine holds, and on the media bytes of requests that have not begun."""

    max_requests: int

    def has_room(self, num_requests: int, num_waiting_bytes: int) -> bool:
        return num_requests < self.max_requests and num_waiting_bytes < MAX_BYTES


class EngineInfo(Protocol):
    """The attributes of an engine, or of several with the same model, that preparation needs."""

    tokenizer: PreTrainedTokenizerBase
    media_rules: MediaRules | None
    image_config: ImageProcessorConfig
    video_config: VideoProcessorConfig
    max_model_len: int
    device: torch.device  # to which this process copies patches

    def load_adapter(self, lora_request: Any) -> Any:
        """Load the adapter of a request, or refuse it."""


class RequestPreparer:
    """Prepares requests for an engine.

    Args:
        processor: None for mmvllm's processor, or an object with the interface of transformers' processors.
        video_backend: name of the video reader (see `processors.videos.backends`).
        processor_kwargs: default `mm_processor_kwargs`; the arguments of a request take precedence.
    """

    def __init__(
        self,
        engine: EngineInfo,
        processor: Any = None,
        video_backend: str = "pyav",
        processor_kwargs: Mapping[str, Any] | None = None,
    ):
        self._engine, self._load = engine, load_with(video_backend)
        self._processor_kwargs = plain_processor_kwargs(processor_kwargs or {})
        image_processor, video_processor = ImageProcessor(engine.image_config), VideoProcessor(engine.video_config)
        rules, max_tokens = engine.media_rules, engine.max_model_len
        self._own = Processor(engine.tokenizer, image_processor, rules, video_processor, max_tokens, self._load)
        self.processor = self._own if processor is None else self.adapt(processor)
        self._device = engine.device

    def adapt(self, processor: Any) -> HFProcessor:
        """Wrap a caller's processor for use in place of `processor`."""
        engine = self._engine
        config, max_tokens = engine.video_config, engine.max_model_len
        return HFProcessor(processor, engine.tokenizer, engine.media_rules, config, max_tokens, self._load)

    def prepare(self, request: Request, load: Load | None = None) -> EngineInput:
        """Convert a request in any form to an engine input; raises RequestError for a bad request."""
        processor = self.processor if isinstance(request, dict) else self._own  # a raw prompt needs no template
        return self.preparing(processor)(as_request(request), load)

    def preparing(self, prepare: Prepare) -> Prepare:
        """Wrap `prepare`: load the request's adapter, add default processor arguments, pin patches, record times."""
        pinned = pinning(prepare, self._device)

        def prepared(request: dict, *rest: Any) -> EngineInput:
            if isinstance(request, dict):
                self._engine.load_adapter(request.get("lora_request"))
                request = self._with_defaults(request)
            return pinned(request, *rest)

        return timed(prepared)

    def _with_defaults(self, request: dict) -> dict:
        own = request.get("mm_processor_kwargs") or {}
        if not self._processor_kwargs or not isinstance(own, Mapping):  # refused later
            return request
        own = plain_processor_kwargs(own)
        replaced = {name for group in TOGETHER if own.keys() & group for name in group}
        others = {name: value for name, value in self._processor_kwargs.items() if name not in replaced}
        return {**request, "mm_processor_kwargs": {**others, **own}}


def check_processor_kwargs(given: Any) -> None:
    """Raise RequestError for invalid `mm_processor_kwargs`."""
    parse_request({"text": "", "mm_processor_kwargs": given})


def pinning(prepare: Prepare, device: torch.device) -> Prepare:
    """Wrap `prepare` so that it moves patches to pinned memory if the device is a GPU, for asynchronous copies."""
    return prepare if device.type != "cuda" else lambda *args: in_pinned_memory(prepare(*args))


def timed(prepare: Prepare) -> Prepare:
    """Wrap `prepare` so that it records its start and end times."""

    def prepare_timed(*args: Any) -> EngineInput:
        start = time.time()
        return replace(prepare(*args), preparation=(start, time.time()))

    return prepare_timed


def as_request(request: Request) -> Any:
    """Wrap a raw prompt in a dict; return anything else unchanged."""
    if isinstance(request, str):
        return {"text": request}
    if isinstance(request, list | tuple) or hasattr(request, "shape"):
        return {"prompt_token_ids": request}
    return request


def with_own_token_ids(request: Request) -> Request:
    """Copy the request's token ids: the caller may reuse its array before a worker prepares the request."""
    if isinstance(request, dict):
        ids = request.get("prompt_token_ids")
        return request if ids is None else {**request, "prompt_token_ids": own_token_ids(ids)}
    return own_token_ids(request) if isinstance(request, list | tuple) or hasattr(request, "shape") else request


@contextmanager
def naming_request(index: int) -> Iterator[None]:
    """Add the index of the request to a RequestError."""
    try:
        yield
    except RequestError as error:
        error.request_index = index
        raise


def slowest_media(request: Request) -> Kind | None:
    """Return the slowest kind of media that a request loads: "video", else "image", else None."""
    kinds = set(media_kinds(request)) if isinstance(request, dict) else ()
    return next((kind for kind in ("video", "image") if kind in kinds), None)


def request_options(request: dict) -> dict[str, Any]:
    """Return a request's options for `LLMEngine.add`: priority, cache salt, adapter and trace headers."""
    options = {"priority": request.get("priority") or 0}
    options |= {name: request.get(name) for name in ("cache_salt", "lora_request")}
    return options | ({"trace_headers": headers} if (headers := request.get("trace_headers")) is not None else {})


def check_lengths(sampling_params: Params, num_requests: int) -> None:
    """Raise RequestError if there are more sampling parameters than requests."""
    if isinstance(sampling_params, list | tuple) and len(sampling_params) > num_requests:
        raise RequestError(
            f"{len(sampling_params)} sampling_params were given for {counted(num_requests, 'request')}; give one each",
            param="sampling_params",
            value=len(sampling_params),
            limit=num_requests,
        )


def params_for(sampling_params: Params, index: int, own: SamplingParams | dict | None = None) -> SamplingParams:
    """Return the request's own parameters, or else the call's: one for all, or a list with one per request."""
    params = own
    if own is None:
        params = sampling_params
        if isinstance(params, list | tuple):
            if index >= len(params):
                raise RequestError(f"{len(params)} sampling_params were given, none for this one; give one per request")
            params = params[index]
    if isinstance(params, dict):
        try:
            params = SamplingParams(**params)
        except RequestError:
            raise
        except (TypeError, ValueError) as error:
            raise RequestError(f"sampling_params: {error}", param="sampling_params") from None
    if not isinstance(params, SamplingParams | None):
        raise RequestError(
            f"sampling_params must be SamplingParams or a dict, got {type(params).__name__}", param="sampling_params"
        )
    return params or SamplingParams()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request with its index in the caller's order; `prompt.result()` returns the input or raises the error."""

    index: int
    request: dict
    prompt: "Future[EngineInput]"

    def engine_input(self) -> EngineInput:
        """Return the engine input; raises RequestError if the request is bad or its preparation failed.

        Raises WorkersUnusable if no request can be prepared.
        """
        try:
            return self.prompt.result()
        except (RequestError, WorkersUnusable):
            raise
        except ValueError as error:
            raise RequestError(str(error)) from error
        except Exception as error:  # from a caller's processor, or a bug; other requests are not affected
            raise RequestError(f"preparation failed: {type(error).__name__}: {error}") from error


class PreparationQueue:
    """Prepares single requests: text at once, media when there is room.

    Images and videos are limited separately, since a few videos may take minutes.

    Args:
        lock: the caller's lock, held during every call and acquired by the workers.
        num_waiting_bytes: returns the media bytes of prepared requests that have not begun.
    """

    def __init__(self, lock: threading.Condition, num_waiting_bytes: Callable[[], int]):
        self._lock, self._num_waiting_bytes = lock, num_waiting_bytes
        self._queued: dict[Kind, dict[Hashable, Callable[[], None]]] = {"image": {}, "video": {}}
        self._num_preparing: Counter[Kind] = Counter()
        self._pool = _worker_threads(2 * NUM_WORKERS + 1)  # one more than media may use: text never waits for media

    @property
    def num_queued(self) -> int:
        """The number of requests with media that no worker has begun."""
        return sum(map(len, self._queued.values()))

    def submit(self, key: Hashable, prepare: Callable[[], None], media: Kind | None) -> None:
        """Call `prepare`, which must not raise, in a worker; `media` is the slowest kind that it loads."""
        if media is None:
            self._pool.submit(prepare)
        else:
            self._queued[media][key] = prepare
            self.advance()

    def discard(self, key: Hashable) -> None:
        """Remove a request that no worker has begun."""
        for queued in self._queued.values():
            queued.pop(key, None)

    def advance(self) -> None:
        """Begin as many preparations as there is room for; called when requests begin or end."""
        for media, queued in self._queued.items():
            while queued and self._num_preparing[media] < NUM_WORKERS and self._num_waiting_bytes() < MAX_BYTES:
                prepare = queued.pop(next(iter(queued)))
                self._num_preparing[media] += 1
                self._pool.submit(prepare).add_done_callback(partial(self._on_done, media))

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _on_done(self, media: Kind, _: Future) -> None:
        with self._lock:
            self._num_preparing[media] -= 1
            self.advance()


class Unprefetched:
    """Prepares requests one after the other, when they are asked for."""

    def __init__(self, requests: Iterable[Request], prepare: Callable[[Request], EngineInput]):
        self._items, self._prepare = deque(enumerate(requests)), prepare

    @property
    def is_exhausted(self) -> bool:
        return not self._items

    def get(self, wait: bool) -> PreparedRequest | None:
        """Return the next request; None if there are no more."""
        if not self._items:
            return None
        index, request = self._items.popleft()
        prompt: Future[EngineInput] = Future()
        try:
            prompt.set_result(self._prepare(request))
        except Exception as error:
            prompt.set_exception(error)
        return PreparedRequest(index, request, prompt)

    def close(self) -> None:
        self._items.clear()


class Prefetcher:
    """Prepares the requests of an iterable, which may be endless or slow, a bounded number ahead.

    A feeder thread reads the iterable and submits requests to a pool.

    Args:
        in_order: return requests in the caller's order, rather than each as soon as it is prepared.
        indices: `PreparedRequest.index` of each request.
    """

    def __init__(
        self,
        requests: Iterable[dict],
        prepare: Prepare,
        max_requests: int,
        max_bytes: int = MAX_BYTES,
        num_workers: int = NUM_WORKERS,
        in_order: bool = True,
        indices: Iterable[int] | None = None,
    ):
        self._started: float | None = None  # when `get` first returned a request
        self._waited = 0.0  # seconds that callers have waited since then
        self._requests, self._prepare = requests, prepare
        self._max_requests, self._max_bytes, self._num_workers = max_requests, max_bytes, num_workers
        self._pool = _worker_threads(num_workers)
        self._changed = threading.Condition()
        self._items: deque[PreparedRequest] = deque()
        self._num_preparing = 0
        self._num_bytes = 0
        self._exhausted = self._closed = False
        self._failure: BaseException | None = None
        self._in_order = in_order
        self._indices = count() if indices is None else iter(indices)
        # A daemon: an endless iterable may block, and then the thread never sees `_closed`.
        threading.Thread(target=self._feed, name="mmvllm-feed", daemon=True).start()

    def get(self, wait: bool) -> PreparedRequest | None:
        """Return the next prepared request; None if none is ready and `wait` is False, or if there are no more.

        With `wait`, an error of the caller's iterable is raised after all requests that precede it.
        """
        with self._changed:
            start = time.perf_counter()
            if wait:
                self._changed.wait_for(self._has_next)
            index = self._ready()
            if self._started is not None:
                self._waited += time.perf_counter() - start
            if index is None:
                if wait and self._failure is not None and not self._items:
                    raise self._failure
                return None
            self._started = self._started or time.perf_counter()
            item = self._items[index]
            del self._items[index]
            self._num_bytes -= _num_bytes(item.prompt)
            self._changed.notify_all()
        return item

    @property
    def is_exhausted(self) -> bool:
        """Whether every request has been handed out."""
        with self._changed:
            return self._exhausted and not self._items and self._failure is None

    @property
    def wait_share(self) -> float:
        """Fraction of the time since the first request in which callers waited for further requests, in [0, 1]."""
        return 0.0 if self._started is None else self._waited / (time.perf_counter() - self._started)

    def finish(self) -> None:
        """Take no more requests from the iterable; requests that were taken before are still returned."""
        with self._changed:
            self._exhausted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop preparing, and drop prepared requests."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _feed(self) -> None:
        try:
            for index, request in zip(self._indices, self._requests, strict=False):
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._exhausted or self._has_room())
                    if self._closed or self._exhausted:
                        return
                    self._num_preparing += 1
                    future = self._pool.submit(self._prepare, request)
                    self._items.append(PreparedRequest(index, request, future))
                future.add_done_callback(self._on_done)
        except BaseException as error:  # an error of the caller's iterable; `get` raises it
            self._failure = error
        finally:
            with self._changed:
                self._exhausted = True
                self._changed.notify_all()

    def _has_room(self) -> bool:
        # At most one request per worker is in preparation, since its bytes are unknown until it is prepared.
        return (
            len(self._items) < self._max_requests
            and self._num_preparing < self._num_workers
            and self._num_bytes < self._max_bytes
        )

    def _on_done(self, future: "Future[EngineInput]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            without_frames(error)  # the error may wait long; its frames hold a decoded image
        with self._changed:
            self._num_preparing -= 1
            self._num_bytes += _num_bytes(future)
            self._changed.notify_all()

    def _has_next(self) -> bool:
        return self._ready() is not None or (self._exhausted and not self._items)

    def _ready(self) -> int | None:
        """Return the position of a request that is ready."""
        candidates = islice(self._items, 1) if self._in_order else self._items
        return next((index for index, item in enumerate(candidates) if item.prompt.done()), None)


def _worker_threads(num_workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_workers, thread_name_prefix="mmvllm-prepare")


def _num_bytes(future: "Future[EngineInput]") -> int:
    failed = future.cancelled() or future.exception() is not None  # an error holds only text: see `without_frames`
    return 0 if failed else future.result().num_bytes
