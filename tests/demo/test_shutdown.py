"""An open page, whose connection never ends by itself, does not delay the server's shutdown."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.server import run as run_module
from tests.helpers.serving.pages import elsewhere, served, until
from tests.helpers.serving.server import ENGINE, serving

pytest.importorskip("gradio")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")


@contextmanager
def open_page(url: str) -> Iterator[list[bytes]]:
    """Hold the connection that a page holds while it is open; its end is recorded as b"end"."""
    received = []

    def hold() -> None:
        with httpx.stream("GET", f"{url}gradio_api/heartbeat/visitor", timeout=60) as response:
            received.extend(response.iter_raw())
        received.append(b"end")  # without an error: the response was completed

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    yield received
    thread.join(30)


@pytest.mark.network
def test_the_page_closes_although_a_tab_is_open(checkpoint):
    with served(checkpoint) as site:
        server = site.page.server
        with open_page(site.url) as received:
            until(lambda: received)
            site.page.close(verbose=False)
            assert not server.thread.is_alive()  # gradio gives up after five seconds
        assert received[-1] == b"end"


@pytest.mark.network
@pytest.mark.spawns
def test_the_server_stops_although_a_tab_is_open(monkeypatch):
    monkeypatch.setattr(run_module, "SEND_SECONDS", 100.0)  # after which connections are aborted
    engine = AsyncLLM(**ENGINE)
    with serving(engine, demo=True) as running, open_page(f"{running.url}/demo/") as received:
        until(lambda: received)
        running.server.should_exit = True
        running.thread.join(60)
        assert not running.thread.is_alive()
    assert received[-1] == b"end"
    elsewhere(engine.shutdown(drain=False))
