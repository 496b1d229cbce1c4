"""Pictures in, records out: the engine fed by workers, and equal pictures captioned once."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.index import Index, keep_caption
from mmvllm.captioning.items import Item
from mmvllm.captioning.preparation import Preparer, WorkerProcesses, prepare_in_worker, without_signals
from mmvllm.captioning.record import COLUMNS
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.llm import LLM
from mmvllm.outputs import RequestOutput
from mmvllm.prefetch import NUM_WORKERS, Prefetcher, Prepared, worker_threads


@dataclass(frozen=True, slots=True)
class Task:
    """An item to be captioned; `key` names its record, `file` is where its caption goes besides.

    What is no picture, but a place that could not be looked into, gets a record of its error too.
    """

    item: Item
    key: str
    file: str | None = None
    is_image: bool = True


class Captioner:
    """One engine and the settings of one job; pictures are prepared in threads, or in processes of their own."""

    def __init__(self, llm: LLM, settings: CaptionSettings, num_workers: int | None = None, in_processes: bool = False):
        self.llm, self.settings = llm, settings
        self._num_workers = num_workers or NUM_WORKERS
        self._in_processes = in_processes
        self._prefetcher: Prefetcher | None = None
        self._is_stopped = False

    @property
    def engine_wait_share(self) -> float:
        """Share of the time since the first picture was ready in which the engine had none to work on, in [0, 1]."""
        return 0.0 if self._prefetcher is None else self._prefetcher.wait_share

    def stop(self) -> None:
        """Finish what the engine has begun, and drop the rest; may be called from a signal handler."""
        self._is_stopped = True
        if self._prefetcher is not None:
            self._prefetcher.finish()

    def records(self, tasks: Iterable[Task], index: Index) -> Iterator[dict]:
        """A record for every task, as they finish; what fails is a record with `error`.

        The tasks are walked in a thread of their own; captions that `index` has are copied.
        """
        under_way = _UnderWay(self.settings, index, lambda: self._is_stopped)
        self._prefetcher = self._prefetch(under_way.requests(tasks))
        params, num_failures = self.settings.sampling_params, 0
        stream = self.llm.stream_prepared(self._prefetcher, params, "return", under_way.check, lambda: self._is_stopped)
        for number, output in stream:
            yield from under_way.finish(number, output)
            if output.arrival_time is not None:  # else it never came to the engine
                num_failures = num_failures + 1 if output.error is not None else 0
            if num_failures > 2 * self.llm.window:  # more than any step, or any few, can have
                raise JobError(f"the engine fails every time, now with: {output.error}")

    def _prefetch(self, requests: Iterator[dict]) -> Prefetcher:
        processor = self.llm.processor
        prepare, make_pool = Preparer(processor), worker_threads
        if self._in_processes:
            prepare, make_pool = prepare_in_worker, WorkerProcesses(processor)
            requests = without_signals(requests)
        return Prefetcher(
            requests,
            prepare,
            max_requests=self.llm.window,
            num_workers=self._num_workers,
            in_order=False,
            make_pool=make_pool,
        )


@dataclass(slots=True)
class _Work:
    """A task under way, with what its preparation said of the picture."""

    task: Task
    digest: str | None = None
    width: int | None = None
    height: int | None = None
    content: str | None = None  # what equal pictures that are asked the same have in common
    is_duplicate: bool = False
    is_dropped: bool = False


class _UnderWay:
    """The tasks between finding and recording, by their number."""

    def __init__(self, settings: CaptionSettings, index: Index, is_stopped: Callable[[], bool]):
        self._settings, self._index, self._is_stopped = settings, index, is_stopped
        self._works: dict[int, _Work] = {}
        self._twins: dict[str, list[_Work]] = {}  # by content: who waits for the caption of one that is in the engine

    def requests(self, tasks: Iterable[Task]) -> Iterator[dict]:
        for number, task in enumerate(tasks):
            if self._is_stopped():
                return
            self._works[number] = _Work(task)
            yield self._settings.request(task.item)

    def check(self, prepared: Prepared) -> None:
        """Keep from the engine what is stopped, and what it has seen already."""
        work, prompt = self._works[prepared.index], prepared.prompt.result()
        work.digest, work.width, work.height = prompt.digest, prompt.width, prompt.height
        if self._is_stopped():
            work.is_dropped = True
            raise ValueError("stopped")
        if self._settings.is_repeatable:
            work.content = self._settings.content_key(work.digest, self._settings.prompt_for(work.task.item))
            self._refuse_what_is_known(work)

    def _refuse_what_is_known(self, work: _Work) -> None:
        if work.content in self._twins:
            self._twins[work.content].append(work)
        elif self._index.caption(work.content) is None:
            self._twins[work.content] = []
            return
        work.is_duplicate = True
        raise ValueError("duplicate")

    def finish(self, number: int, output: RequestOutput) -> Iterator[dict]:
        """The records that an output of the engine, or its refusal, leads to."""
        work = self._works.pop(number)
        if work.is_dropped:
            return
        if work.is_duplicate:
            if (original := self._index.caption(work.content)) is not None:  # else the work is among the twins
                yield self._copy(work, original)
            return
        record = self._record(work, output)
        keep_caption(self._settings, self._index, record)
        yield record
        for twin in self._twins.pop(work.content, ()):
            yield self._copy(twin, record)

    def _record(self, work: _Work, output: RequestOutput) -> dict:
        error = output.error
        if error is not None:  # without the words that say which picture it is about: the path already does
            error = error.removeprefix("image 0: ").removeprefix(f"{work.task.item.path:.200}: ")
        made = {
            "caption": self._settings.caption(output.text) if error is None else None,
            "prompt_tokens": output.num_prompt_tokens,
            "image_tokens": output.num_image_tokens,
            "completion_tokens": len(output.token_ids),
            "finish_reason": output.finish_reason if work.task.is_image else None,
            "seconds": None if error is not None else round(output.finish_time - output.arrival_time, 3),
        }
        return dict.fromkeys(COLUMNS) | self._describe(work, error) | made

    def _copy(self, work: _Work, original: dict) -> dict:
        """The original's caption or error for a picture that equals it."""
        own = {"duplicate_of": original["path"], "seconds": 0.0}
        return original | self._describe(work, original["error"]) | own

    def _describe(self, work: _Work, error: str | None) -> dict:
        """What a record says of the picture itself."""
        item = work.task.item
        return {
            "path": item.path,
            "id": item.id,
            "digest": work.digest,
            "error": error,
            "width": work.width,
            "height": work.height,
            "time": round(time.time(), 3),
            "model": self._settings.model,
            "prompt": self._settings.prompt_for(item),
            "file": None if error is not None else work.task.file,
            "settings": self._settings.fingerprint,
            "key": work.task.key,
        }
