"""Served demo pages."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmvllm.async_llm import AsyncLLM
from mmvllm.media import MediaPolicy

if TYPE_CHECKING:
    from mmvllm.demo.page import Page


@dataclass
class Site:
    """A served page and its engine; `page` is None if a server has mounted it."""

    url: str
    engine: AsyncLLM
    page: "Page | None" = None


def elsewhere(coroutine: Coroutine) -> None:
    """Run a coroutine in another thread: the browser's driver may have an event loop in the thread of the tests."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, coroutine).result()


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Poll a condition that another thread or the browser makes true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


@contextmanager
def in_steps(engine: AsyncLLM) -> Iterator[Callable[[int], None]]:
    """Let the engine make only as many steps as are released, so that tests do not depend on its speed."""
    core, steps = engine._engine, threading.Semaphore(0)
    real = core.step

    def step():
        assert steps.acquire(timeout=300)
        return real()

    core.step = step
    try:
        yield steps.release
    finally:
        core.step = real
        steps.release()


@contextmanager
def served(model=None, policy: MediaPolicy | None = None, max_images: int = 8, **engine_args) -> Iterator[Site]:
    from mmvllm.demo.look import launch_options
    from mmvllm.demo.page import build_page
    from mmvllm.demo.settings import DemoSettings

    small = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 1024, "skip_warmup": True}
    engine = AsyncLLM(model, **small | engine_args)
    page = build_page(engine, DemoSettings(policy or MediaPolicy(), max_images))
    page.launch(prevent_thread_lock=True, quiet=True, share=False, **launch_options(page))
    try:
        yield Site(page.local_url, engine, page)
    finally:
        page.close(verbose=False)
        elsewhere(engine.shutdown(drain=False))
