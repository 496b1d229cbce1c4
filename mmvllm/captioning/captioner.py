"""Pictures in, records out: the engine fed by worker threads, and equal pictures captioned once."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import xxhash
from PIL.Image import Image

from mmvllm.captioning.index import Index
from mmvllm.captioning.items import Item
from mmvllm.captioning.record import COLUMNS
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.llm import LLM
from mmvllm.outputs import RequestOutput
from mmvllm.prefetch import NUM_WORKERS, Prefetcher, Prepared
from mmvllm.processors.load import load_image


@dataclass(frozen=True, slots=True)
class Task:
    """An item to be captioned; `key` names its record, `file` is where its caption goes besides."""

    item: Item
    key: str
    file: str | None = None


@dataclass(slots=True)
class _Work:
    """A task under way. The worker thread that reads the picture fills in what it learns."""

    task: Task
    digest: str | None = None  # of the decoded pixels
    width: int | None = None
    height: int | None = None
    content: str | None = None  # with settings and prompt: what equal pictures have in common
    is_duplicate: bool = False
    is_dropped: bool = False

    def load(self) -> Image:
        image = load_image(self.task.item.read())
        self.width, self.height = image.size
        self.digest = xxhash.xxh3_128_hexdigest(f"{image.size}".encode() + image.tobytes())
        return image


class Captioner:
    """One engine and the settings of one job."""

    def __init__(self, llm: LLM, settings: CaptionSettings, num_workers: int | None = None):
        self.llm, self.settings = llm, settings
        self._num_workers = num_workers or NUM_WORKERS
        self._prefetcher: Prefetcher | None = None
        self._started: float | None = None  # when the first picture was ready
        self._waited_before = 0.0
        self._ended: float | None = None

    @property
    def engine_wait_share(self) -> float:
        """Share of the time since the first picture was ready in which the engine had none to work on, in [0, 1]."""
        if self._started is None:
            return 0.0
        seconds = (self._ended or time.perf_counter()) - self._started
        return (self._prefetcher.waited_seconds - self._waited_before) / seconds

    def records(
        self, tasks: Iterable[Task], index: Index, is_stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[dict]:
        """A record for every task, as they finish; what fails is a record with `error`.

        The tasks are walked in a thread of their own; captions that `index` has are copied. Once `is_stopped`, what the
        engine has begun is finished and the rest dropped.
        """
        under_way: dict[str, _Work] = {}
        twins: dict[str, list[_Work]] = {}  # by content: those that wait for the caption of one that is in the engine
        self._prefetcher = Prefetcher(
            self._requests(tasks, under_way, is_stopped),
            partial(self.llm.processor, load=_Work.load),
            max_requests=self.llm.window,
            num_workers=self._num_workers,
        )
        params = self.settings.sampling_params
        check = partial(self._check, under_way, twins, index, is_stopped)
        for _, output in self.llm.stream_prepared(self._prefetcher, params, "return", check):
            work = under_way.pop(output.request_id)
            if work.is_dropped:
                continue
            original = index.caption(work.content) if work.is_duplicate else None
            if original is not None:
                yield self._copy(work, original)
            elif not work.is_duplicate:  # else it is among the twins
                record = self._record(work, output)
                self.settings.keep_caption(record, index)
                yield record
                for twin in twins.pop(work.content, ()):
                    yield self._copy(twin, record)
        self._ended = time.perf_counter()

    def _requests(
        self, tasks: Iterable[Task], under_way: dict[str, _Work], is_stopped: Callable[[], bool]
    ) -> Iterator[dict]:
        for number, task in zip(count(), tasks):
            if is_stopped():
                return
            work = under_way[str(number)] = _Work(task)
            yield self.settings.request(task.item, work, str(number))

    def _check(
        self,
        under_way: dict[str, _Work],
        twins: dict[str, list[_Work]],
        index: Index,
        is_stopped: Callable[[], bool],
        prepared: Prepared,
    ) -> None:
        """Keep from the engine what is stopped, and what it has seen already."""
        if self._started is None:
            self._started, self._waited_before = time.perf_counter(), self._prefetcher.waited_seconds
        work = under_way[prepared.request["request_id"]]
        if is_stopped():
            work.is_dropped = True
            raise ValueError("stopped")
        if not self.settings.is_repeatable:
            return
        work.content = self.settings.content_key(work.digest, self.settings.prompt_for(work.task.item))
        if work.content in twins:
            twins[work.content].append(work)
        elif index.caption(work.content) is None:
            twins[work.content] = []
            return
        work.is_duplicate = True
        raise ValueError("duplicate")

    def _record(self, work: _Work, output: RequestOutput) -> dict:
        error = output.error
        if error is not None:  # without the words that say which picture it is about: the path already does
            error = error.removeprefix("image 0: ").removeprefix(f"{work.task.item.path:.200}: ")
        return (
            dict.fromkeys(COLUMNS)
            | self._describe(work)
            | {
                "caption": self.settings.caption(output.text) if error is None else None,
                "error": error,
                "prompt_tokens": output.num_prompt_tokens,
                "image_tokens": output.num_image_tokens,
                "completion_tokens": len(output.token_ids),
                "finish_reason": output.finish_reason,
                "seconds": None if error is not None else round(output.finish_time - output.arrival_time, 3),
            }
        )

    def _copy(self, work: _Work, original: dict) -> dict:
        """The original's caption or error for a picture that equals it."""
        return original | self._describe(work) | {"duplicate_of": original["path"], "seconds": 0.0}

    def _describe(self, work: _Work) -> dict:
        """What a record says of the picture itself."""
        item = work.task.item
        return {
            "path": item.path,
            "id": item.id,
            "digest": work.digest,
            "width": work.width,
            "height": work.height,
            "time": round(time.time(), 3),
            "model": self.settings.model,
            "prompt": self.settings.prompt_for(item),
            "file": work.task.file,
            "settings": self.settings.fingerprint,
            "key": work.task.key,
        }
