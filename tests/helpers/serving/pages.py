"""Served demo pages."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import httpx

from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.media.policy import MediaPolicy

if TYPE_CHECKING:
    from mmvllm.demo.page import Page


CONTROLS = ["", 0, 1, 0, 1, 20, -1, 19600, 38416, 2]  # their values, in the order of `Options`
META = {"_type": "gradio.FileData"}

get = partial(httpx.get, timeout=60)
post = partial(httpx.post, timeout=60)


@dataclass
class Site:
    """A served page and its engine; `page` is None if a server has mounted it."""

    url: str
    engine: AsyncLLM
    page: "Page | None" = None

    @cached_property
    def events(self) -> dict[tuple[str | None, str], int]:
        """Gradio's numbers of the events with a handler, by the component's id and the kind of event."""
        config = get(f"{self.url}config").json()
        ids = {part["id"]: part["props"].get("elem_id") for part in config["components"]}
        calls = [call for call in config["dependencies"] if call["backend_fn"]]
        return {(ids.get(target), kind): call["id"] for call in calls for target, kind in call["targets"]}


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


def event(
    site: Site, component: str | None, kind: str, data: list, session: str = "crafted", about: dict | None = None
) -> tuple[dict, list]:
    """Send an event as the page's script does; returns the final message and the texts that the page shows."""
    index = site.events[component, kind]
    body = {"data": data, "fn_index": index, "session_hash": session, "event_data": about}
    sent = {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}
    joined = post(f"{site.url}gradio_api/queue/join", **sent)
    if joined.status_code == 400:  # it does not reach the page
        return {"success": False, "output": {"error": joined.text}}, []
    assert joined.is_success, joined.text
    messages = []
    with httpx.stream("GET", f"{site.url}gradio_api/queue/data", params={"session_hash": session}, timeout=30) as got:
        for line in got.iter_lines():
            if line.startswith("data: "):
                messages.append(json.loads(line[6:]))
                if messages[-1]["msg"] == "process_completed":
                    break
    return messages[-1], [m["log"] for m in messages if m["msg"] == "log"]


@contextmanager
def served(model=None, policy: MediaPolicy | None = None, max_images: int = 8, **engine_args) -> Iterator[Site]:
    from mmvllm.demo.page import build_page
    from mmvllm.demo.settings import DemoSettings
    from mmvllm.demo.theme import launch_options

    small = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 1024, "skip_warmup": True}
    engine = AsyncLLM(model, **small | engine_args)
    page = build_page(engine, DemoSettings(policy or MediaPolicy(), max_images))
    page.launch(prevent_thread_lock=True, quiet=True, share=False, **launch_options(page))
    try:
        yield Site(page.local_url, engine, page)
    finally:
        page.close(verbose=False)
        elsewhere(engine.shutdown(drain=False))
