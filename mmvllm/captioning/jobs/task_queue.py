"""Distributes the tasks of a job over several engines, and queues the tasks of a dead engine again."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mmvllm.captioning.jobs.captioner import Task

POLL_SECONDS = 0.05  # an engine waits for images, then for records, in turns of this length
FOUND_AHEAD = 64  # found tasks that no engine has taken


@dataclass(slots=True)
class Work:
    """A task, its number among all tasks, and how many engines died while they had it."""

    number: int
    task: Task
    num_deaths: int = 0


class TaskQueue:
    """The tasks of a job, shared by the thread that finds images, one thread per engine, and the consumer of records.

    The tasks of an engine that died are queued again. After the second death, a task is given alone to an idle engine,
    which identifies a task that kills its engine; after the third death, it fails.

    Args:
        failure: makes the record of a task from the reason of its third death.
    """

    def __init__(self, failure: Callable[[Task, str], dict]):
        self._failure = failure
        self._changed = threading.Condition()
        self._new: deque[Work] = deque()
        self._again: deque[Work] = deque()
        self._alone: deque[Work] = deque()
        self._results: deque[tuple[int, tuple[Task, dict]]] = deque()
        self._num_in_flight = 0
        self._is_exhausted = self._is_stopped = False
        self._error: BaseException | None = None
        self._has_failed = False

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> None:
        """Give no further tasks; may be called from a signal handler."""
        self._is_stopped = True

    def fail(self, error: BaseException) -> None:
        """Make `results` raise this error after the records that are ready."""
        with self._changed:
            self._error, self._is_stopped, self._has_failed = error, True, True
            self._changed.notify_all()

    def results(self, tasks: Iterable[Task]) -> Iterator[tuple[int, tuple[Task, dict]]]:
        """Queue the tasks for the engines, and yield (number, (task, record)) as the records arrive.

        Raises an exception of `tasks` after the records of earlier tasks, and the error that `fail` was called with.
        """
        threading.Thread(target=self._feed, args=(tasks,), name="mmvllm-find", daemon=True).start()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._results or self._is_over())
                ready = [self._results.popleft() for _ in range(len(self._results))]
            if not ready:
                break
            yield from ready
        if self._error is not None:
            raise self._error

    def take(self, in_flight: dict[int, Work], most: int) -> list[Work]:
        """Return up to `most` tasks, and add them to `in_flight`; an engine without tasks waits a moment for some."""
        with self._changed:
            if not in_flight:
                self._changed.wait_for(lambda: self._has_tasks() and not self._is_stopped, POLL_SECONDS)
            works = [] if self._is_stopped else [*self._next(in_flight, most)]
            in_flight.update((work.number, work) for work in works)
            self._num_in_flight += len(works)
            self._changed.notify_all()
            return works

    def finish(self, in_flight: dict[int, Work], records: list[tuple[int, dict | None]]) -> None:
        """Add the records of an engine; a task that was dropped has the record None."""
        with self._changed:
            for number, record in records:
                work = in_flight.pop(number)
                self._num_in_flight -= 1
                if record is not None:
                    self._results.append((number, (work.task, record)))
            self._changed.notify_all()

    def give_back(self, in_flight: dict[int, Work], reason: str) -> None:
        """Take back the tasks of an engine that died."""
        with self._changed:
            for work in in_flight.values():
                work.num_deaths += 1
                if work.num_deaths > 2:
                    text = f"captioning failed, its engine's process died {work.num_deaths} times: {reason}"
                    self._results.append((work.number, (work.task, self._failure(work.task, text))))
                else:
                    (self._again if work.num_deaths == 1 else self._alone).append(work)
            self._num_in_flight -= len(in_flight)
            in_flight.clear()
            self._changed.notify_all()

    def _feed(self, tasks: Iterable[Task]) -> None:
        try:
            for number, task in enumerate(tasks):
                with self._changed:
                    while not self._changed.wait_for(lambda: len(self._new) < FOUND_AHEAD, POLL_SECONDS):
                        if self._is_stopped:
                            return
                    self._new.append(Work(number, task))
                    self._changed.notify_all()
        except BaseException as error:  # `results` raises it
            self._error = error
        finally:
            with self._changed:
                self._is_exhausted = True
                self._changed.notify_all()

    def _next(self, in_flight: dict[int, Work], most: int) -> Iterator[Work]:
        if any(work.num_deaths > 1 for work in in_flight.values()):
            return
        if self._alone and not in_flight:
            yield self._alone.popleft()
            return
        for works in (self._again, self._new):
            while works and most > 0:
                most -= 1
                yield works.popleft()

    def _has_tasks(self) -> bool:
        return bool(self._new or self._again or self._alone)

    def _is_over(self) -> bool:
        if self._has_failed or self._num_in_flight:
            return self._has_failed
        return self._is_stopped or (self._is_exhausted and not self._has_tasks())
