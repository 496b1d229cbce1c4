"""Turns tasks into records: prepares images and clips ahead of the engine, and captions duplicates only once."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.jobs.ordering import in_order
from mmvllm.captioning.jobs.preparation import CaptionPreparer, WorkerProcesses
from mmvllm.captioning.json_captions import with_object
from mmvllm.captioning.multi_prompt import LIST, captions_of, first_error
from mmvllm.captioning.outputs.index import Index, keep_caption
from mmvllm.captioning.outputs.record import COLUMNS, MEDIA_INFO
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.loading import ItemLoader
from mmvllm.entrypoints.llm import LLM
from mmvllm.entrypoints.request_queue import Prefetcher, Prepare, PreparedRequest, pinning, request_options, timed
from mmvllm.entrypoints.request_stream import EngineRequest, Key
from mmvllm.errors import ArgumentError, MediaFileError, RequestError
from mmvllm.outputs import RequestOutput
from mmvllm.processes.pool import NUM_WORKERS, WorkersUnusable
from mmvllm.processors.chat.hf_processor import HFProcessor
from mmvllm.processors.chat.processor import Processor
from mmvllm.processors.download import without_login

Select = Callable[[PreparedRequest], bool]


@dataclass(frozen=True, slots=True)
class Task:
    """An item to caption; `key` identifies its record, and `file` is the caption file to write, if any.

    A folder, tar or list line that could not be read is a task too, with `has_source` false: its record has the error.
    """

    item: Item
    key: str
    file: str | None = None
    has_source: bool = True


class Captioner:
    """Captions the tasks of one job with one engine; images are prepared in threads or in worker processes.

    With `ordered`, records come in the order of their tasks, so a slow image holds up the images after it.

    A subclass without an engine defines how images are prepared and where the outputs come from.

    Raises ArgumentError if the engine's processor cannot be sent to worker processes or cannot render the job's
    messages, or if the schema of captions cannot be enforced.
    """

    noun = "the engine"  # the source of the captions in messages

    def __init__(
        self,
        llm: LLM | None,
        settings: CaptionSettings,
        loader: ItemLoader,
        num_workers: int | None = None,
        in_processes: bool = False,
        ordered: bool = False,
    ):
        self.llm, self.settings = llm, settings
        if llm is not None:
            _check_schema(llm, settings)
        self._loader, self._ordered = loader, ordered
        self._num_workers = num_workers or NUM_WORKERS
        self._processes = None
        if in_processes:
            self._processes = WorkerProcesses(llm.processor, self._num_workers, loader)
        if llm is not None:
            _check_prompt(llm, settings)
        self._prefetcher: Prefetcher | None = None
        self._is_stopped = False

    @property
    def engine_wait_share(self) -> float:
        """Share of the time since the first image was prepared in which the engine waited for images, in [0, 1]."""
        return 0.0 if self._prefetcher is None else self._prefetcher.wait_share

    @property
    def max_requests(self) -> int:
        """Number of requests that keep the engine busy."""
        return self.llm.admission.max_requests

    def stop(self) -> None:
        """Finish the requests that the engine has begun, and drop the rest; may be called from a signal handler."""
        self._is_stopped = True
        if self._prefetcher is not None:
            self._prefetcher.finish()

    def records(self, tasks: Iterable[Task], index: Index) -> Iterator[dict]:
        """Yield a record for every task; a failed task has a record with `error`.

        A separate thread iterates the tasks. Captions that `index` already has are copied.
        """
        try:
            if self._ordered:
                yield from in_order(partial(self._numbered, index), tasks, lambda: self._is_stopped)
            else:
                yield from (record for _, record in self._numbered(index, tasks))
        finally:
            self._is_stopped = True  # ends the thread that iterates the tasks, if it waits

    def _numbered(self, index: Index, tasks: Iterable[Task]) -> Iterator[tuple[int, dict]]:
        """Yield the number and the record of each task as it finishes."""
        jobs = _TasksInFlight(self.settings, index, lambda: self._is_stopped)
        self._prefetcher = self._prefetch(jobs.requests(tasks))
        num_failures = 0
        try:
            for key, output in self._outputs(jobs.select):
                yield from jobs.finish(key, output)
                if output is not None and output.arrival_time is not None:  # the request reached the engine
                    num_failures = num_failures + 1 if output.error is not None else 0
                    if num_failures > 2 * self.max_requests:  # more than a few steps can cause
                        raise JobError(f"{self.noun} fails every time, now with: {output.error}")
        except WorkersUnusable as error:
            remedy = "videos need them" if self._processes is None else "run the same job again without them"
            raise JobError(f"{error}; {remedy}") from error
        finally:
            self._prefetcher.close()
            if self._processes is not None:
                self._processes.close()

    def _prefetch(self, requests: Iterator[dict]) -> Prefetcher:
        return Prefetcher(
            requests,
            self._preparer(),
            max_requests=self.max_requests,
            num_workers=self._num_workers,
            in_order=self._ordered,
        )

    def _preparer(self) -> Prepare:
        prepare = self._processes or CaptionPreparer(self.llm.processor, self._loader)
        return timed(pinning(prepare, self.llm.device))

    def _outputs(self, select: Select) -> Iterator[tuple[Key, RequestOutput | None]]:
        """Yield (number of the task and of the prompt, output); the output is None if the task is not selected."""
        params = self.settings.sampling_params

        def plan(item: PreparedRequest) -> list[EngineRequest]:
            prompt, options = item.engine_input(), request_options(item.request)
            prompts = (prompt, *prompt.others) if select(item) else ()
            return [EngineRequest(one, params, options) for one in prompts]

        return self.llm.stream_prepared(self._prefetcher, plan, lambda: self._is_stopped)


def _check_schema(llm: LLM, settings: CaptionSettings) -> None:
    try:
        llm.engine.grammars.check(settings.sampling_params.structured)
    except RequestError as error:
        raise ArgumentError("{schema}: {reason}", reason=error.reason.removeprefix("structured.json ")) from None


def _check_prompt(llm: LLM, settings: CaptionSettings) -> None:
    """Raise ArgumentError for messages that cannot become a prompt, for example without a chat template."""
    if not isinstance(llm.processor, Processor | HFProcessor):  # other processors need no chat template
        return
    try:
        llm.processor.chat_template.render(settings.messages_without_media, settings.chat_template_kwargs or {})
    except RequestError as error:
        raise ArgumentError("no image can be captioned: {reason}", reason=error.reason) from None


@dataclass(slots=True)
class _Work:
    """A task in flight; its preparation reports `media_info` about the image or clip."""

    number: int
    task: Task
    media_info: dict[str, Any] = field(default_factory=dict)
    num_media_tokens: int = 0
    content: str | None = None  # content key, equal for duplicates with the same prompt
    is_duplicate: bool = False
    num_prompts: int = 1  # number of prompts for the engine
    outputs: dict[int, RequestOutput] = field(default_factory=dict)  # by the number of the prompt

    def forget_source(self) -> None:
        """Drop the source after preparation: a data URI may have megabytes, which a record does not need."""
        self.task = replace(self.task, item=replace(self.task.item, source=None))


class _TasksInFlight:
    """The tasks of a job that are found but not recorded, by their number."""

    def __init__(self, settings: CaptionSettings, index: Index, is_stopped: Callable[[], bool]):
        self._settings, self._index, self._is_stopped = settings, index, is_stopped
        self._works: dict[int, _Work] = {}
        self._duplicates: dict[str, list[_Work]] = {}  # by the content key of a caption that is being generated

    def requests(self, tasks: Iterable[Task]) -> Iterator[dict]:
        for number, task in enumerate(tasks):
            if self._is_stopped():
                return
            self._works[number] = _Work(number, task)
            yield self._settings.request(task.item)

    def select(self, prepared: PreparedRequest) -> bool:
        """Return whether the engine captions a prepared request: not if the job is stopped or it is a duplicate."""
        work, prompt = self._works[prepared.index], prepared.prompt.result()
        work.num_prompts = 1 + len(prompt.others)
        work.media_info, work.num_media_tokens = prompt.media_info, prompt.num_media_tokens
        work.forget_source()
        if self._is_stopped():
            return False
        if self._settings.is_repeatable:
            work.content = self._settings.content_key(
                work.media_info["digest"], self._settings.prompt_for(work.task.item)
            )
            work.is_duplicate = self._is_duplicate(work)
        return not work.is_duplicate

    def _is_duplicate(self, work: _Work) -> bool:
        if work.content in self._duplicates:
            self._duplicates[work.content].append(work)
            return True
        if self._index.caption(work.content) is not None:
            return True
        self._duplicates[work.content] = []
        return False

    def finish(self, key: Key, output: RequestOutput | None) -> Iterator[tuple[int, dict]]:
        """Yield the numbered records that an output completes; a task that was not selected has the output None."""
        number, prompt_index = key
        if output is not None:
            work = self._works.get(number)
            if work is None:  # another prompt of the image was dropped when the job was stopped
                return
            work.outputs[prompt_index] = output
            if len(work.outputs) < work.num_prompts:
                return
            del self._works[number]
            record = _record(self._settings, work, [work.outputs[i] for i in range(work.num_prompts)])
            keep_caption(self._settings, self._index, record)
            yield number, record
            for duplicate in self._duplicates.pop(work.content, ()):
                yield duplicate.number, self._copy(duplicate, record)
        elif (
            (work := self._works.pop(number, None))
            and work.is_duplicate
            and (original := self._index.caption(work.content)) is not None
        ):
            yield number, self._copy(work, original)  # a duplicate of an image in flight is yielded with that image

    def _copy(self, work: _Work, original: dict) -> dict:
        """Return the record of a duplicate, with the caption or error of the original."""
        own = {"duplicate_of": original["path"], "seconds": 0.0}
        return dict.fromkeys(COLUMNS) | original | _describe(self._settings, work, original["error"]) | own


def failure(settings: CaptionSettings, task: Task, reason: str) -> dict:
    """Return the record of a task that no engine could finish."""
    return _record(settings, _Work(0, task), [RequestOutput("", error=reason)])


def _record(settings: CaptionSettings, work: _Work, outputs: list[RequestOutput]) -> dict:
    prompts, output = settings.prompts_for(work.task.item), outputs[0]
    which, failed = first_error(prompts, outputs) or ("", output)
    reason = _reason(work.task.item, failed)
    error = None if reason is None else f"{which}{reason}"
    made = {
        "caption": settings.caption(output.text) if error is None else None,
        "boxes": None if error is not None else [box.to_dict() for box in output.boxes] or None,
        "prompt_tokens": sum(output.num_prompt_tokens for output in outputs),
        "image_tokens": min(work.num_media_tokens, output.num_prompt_tokens),
        "completion_tokens": sum(len(one.token_ids) for output in outputs for one in output.completions),
        "finish_reason": failed.finish_reason if work.task.has_source else None,
        "seconds": None if error is not None else _seconds(outputs),
    }
    if settings.makes_several:
        made[LIST] = captions_of(prompts, outputs, settings.caption, settings.schema is not None)
    record = dict.fromkeys(COLUMNS) | _describe(settings, work, error) | made
    return record if settings.schema is None else with_object(record)


def _seconds(outputs: list[RequestOutput]) -> float:
    """Return the time in the engine, from the first prompt to the last caption."""
    begin, end = min(output.arrival_time for output in outputs), max(output.finish_time for output in outputs)
    return round(end - begin, 3)


def _describe(settings: CaptionSettings, work: _Work, error: str | None) -> dict:
    """Return the fields of a record about its image or clip, its task and the settings."""
    item = work.task.item
    return {
        "path": item.path,
        "id": item.id,
        "error": error,
        **dict.fromkeys(MEDIA_INFO),
        **(work.media_info or requested_range(item)),
        "time": round(time.time(), 3),
        "model": settings.model,
        "prompt": settings.prompt_for(item),
        "file": None if error is not None else work.task.file,
        "settings": settings.fingerprint,
        "key": work.task.key,
    }


def _reason(item: Item, output: RequestOutput) -> str | None:
    """Return why there is no caption, or None. The text does not name the image, because the record has its path."""
    return output.error if output.exception is None else reason_of(item, output.exception)


def reason_of(item: Item, error: ValueError) -> str:
    """Return the text of an error about an item, without the item's path."""
    if not isinstance(error, RequestError):
        return str(error)
    is_named = isinstance(error, MediaFileError) and error.source not in (f"{item.path:.200}", without_login(item.path))
    return f"{error.source}: {error.reason}" if is_named else error.reason


def requested_range(item: Item) -> dict[str, float | None]:
    """Return the requested range of a video, for a record without more information; {} for an image."""
    return {"start": item.start or 0.0, "end": item.end} if item.is_video else {}
