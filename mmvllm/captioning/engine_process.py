"""What runs in the processes of a captioning job with several engines; each function is a task of `WorkerPool`."""

from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from mmvllm.captioning.engine_worker import EngineSpec, EngineWorker
from mmvllm.captioning.items import Item
from mmvllm.errors import EngineFailed

_engine: EngineWorker | None = None
_done: "SimpleQueue[tuple[int, Future[dict]]]" = SimpleQueue()


def start_engine(spec: EngineSpec) -> int:
    """Load the model; returns how many images keep the engine busy."""
    global _engine
    _engine = EngineWorker(spec)
    return _engine.max_requests


def exchange(
    items: list[tuple[int, Item]], is_stopped: bool, seconds: float
) -> tuple[list[tuple[int, dict | None]], float]:
    """Give the engine images, each with a number, and take what is finished; waits some seconds for the first record.

    The record of an image that is dropped, because the job is stopped, is None. The second result is the engine's
    `wait_share`. Raises what ended the engine.
    """
    if _engine is None:
        raise EngineFailed("the engine's process has ended between two images")
    for number, item in items:
        _engine.submit(item).add_done_callback(partial(_finish, number))
    if is_stopped:
        _engine.stop()
    finished = []
    with suppress(Empty):
        finished.append(_done.get(timeout=seconds))
        while True:
            finished.append(_done.get_nowait())
    records = [(number, None if reply.cancelled() else reply.result()) for number, reply in finished]
    return records, _engine.engine_wait_share


def _finish(number: int, reply: "Future[dict]") -> None:
    _done.put((number, reply))
