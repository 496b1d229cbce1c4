"""Tasks of several engines: which engine has which, and what becomes of the tasks of dead engines."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from mmvllm.captioning.jobs.captioner import Task
from mmvllm.captioning.jobs.task_queue import TaskQueue, Work
from mmvllm.captioning.sources.items import Item


def named(number: int) -> Task:
    return Task(Item(f"{number}", f"{number}", f"{number}"), f"key of {number}")


@pytest.fixture
def queue() -> TaskQueue:
    return TaskQueue(lambda task, reason: {"path": task.item.path, "error": reason})


@pytest.fixture
def results(queue) -> Iterator[Callable[[Iterator[Task]], Future]]:
    """Take the results of tasks in a thread: number -> error."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda tasks: pool.submit(lambda: {i: record["error"] for i, (_, record) in queue.results(tasks)})
        queue.stop()


def take(queue: TaskQueue, number: int) -> dict[int, Work]:
    """This number of tasks, for a new engine."""
    in_flight: dict[int, Work] = {}
    while len(in_flight) < number:  # they are found in a thread
        queue.take(in_flight, number - len(in_flight))
    return in_flight


def finish(queue: TaskQueue, in_flight: dict[int, Work]) -> None:
    queue.finish(in_flight, [(number, {"error": None}) for number in [*in_flight]])


def test_every_task_is_given_once(queue, results):
    made = results(map(named, range(200)))
    first, second = take(queue, 30), take(queue, 30)
    assert not first.keys() & second.keys()
    finish(queue, second)
    finish(queue, first)
    for _ in range(14):
        finish(queue, take(queue, 10))
    assert made.result(30) == dict.fromkeys(range(200))


def test_tasks_of_an_engine_that_died_are_given_first(queue, results):
    made = results(map(named, range(20)))
    dead = take(queue, 10)
    lost = {*dead}
    queue.give_back(dead, "it was killed")
    again = take(queue, 10)
    assert {*again} == lost and dead == {}
    finish(queue, again)
    finish(queue, take(queue, 10))
    assert made.result(30) == dict.fromkeys(range(20))


def test_a_task_that_ends_every_engine_fails_alone(queue, results):
    made = results(map(named, range(12)))
    finish(queue, take(queue, 4))
    for _ in range(2):
        queue.give_back(take(queue, 8), "it was killed")
    for _ in range(8):
        alone = take(queue, 1)
        assert queue.take(alone, 10) == []  # nothing else is given to an engine with such a task
        if 7 in alone:
            queue.give_back(alone, "it was killed")
        else:
            finish(queue, alone)
    reason = "captioning failed, its engine's process died 3 times: it was killed"
    assert made.result(30) == dict.fromkeys(range(12)) | {7: reason}


def test_an_engine_with_other_tasks_does_not_get_one_that_two_engines_died_of(queue, results):
    made = results(map(named, range(20)))
    busy = take(queue, 1)
    for _ in range(2):
        queue.give_back(take(queue, 1), "it was killed")
    while len(busy) < 19:
        queue.take(busy, 20)
    assert {work.num_deaths for work in busy.values()} == {0}
    finish(queue, busy)
    finish(queue, take(queue, 1))
    assert made.result(30) == dict.fromkeys(range(20))


def test_a_stop_waits_for_what_engines_have_and_drops_the_rest(queue, results):
    made = results(map(named, range(100)))
    first, second = take(queue, 10), take(queue, 10)
    begun = {*first}
    queue.stop()
    assert queue.take({}, 10) == []
    queue.give_back(second, "it was killed")
    assert not made.done()
    queue.finish(first, [(number, None if number == 3 else {"error": None}) for number in begun])
    assert made.result(30) == dict.fromkeys(begun - {3})


def test_an_error_of_the_search_is_raised_after_the_records(queue):
    def tasks() -> Iterator[Task]:
        yield named(0)
        raise ValueError("the list ends")

    taken = []
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: [taken.append(number) for number, _ in queue.results(tasks())])
        finish(queue, take(queue, 1))
        with pytest.raises(ValueError, match="the list ends"):
            made.result(30)
    assert taken == [0]


def test_an_engines_error_does_not_wait_for_other_engines(queue, results):
    made = results(map(named, range(10)))
    take(queue, 10)
    queue.fail(RuntimeError("no engine begins"))
    with pytest.raises(RuntimeError, match="no engine begins"):
        made.result(30)
