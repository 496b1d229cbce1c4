"""AsyncLLM under test: requests, waiting for a state, and a `load` function that blocks."""

import asyncio
import threading
import time
from functools import wraps

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.processors.images.load import load_image
from tests.helpers.engine.engines import assert_engine_idle
from tests.helpers.engine.requests import ask, noise_image

OPTIONS = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 256, "skip_warmup": True}
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)  # with slow steps, 10 ms per token
QUESTION = ask(noise_image(80, 60), "Describe this image.")
REQUESTS = [
    (QUESTION, SamplingParams(max_tokens=40)),
    (ask("Count the shapes."), SamplingParams(max_tokens=40, ignore_eos=True)),
    (
        ask("One ", noise_image(60, 90, 1), " two ", noise_image(70, 70, 2)),
        SamplingParams(max_tokens=30, ignore_eos=True, n=3),
    ),
    (ask("And?"), SamplingParams(max_tokens=30, temperature=1.0, seed=5, n=2, logprobs=2, ignore_eos=True)),
    (ask("Again"), SamplingParams(max_tokens=30, temperature=1.5, seed=7, top_p=0.9, ignore_eos=True)),
]


def async_test(test):
    """Run an async test in a new event loop; it fails after 120 seconds."""

    @wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 120))

    return run


def wait_until(condition, state: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never {state}"
        time.sleep(0.005)


async def reached(condition, state: str) -> None:
    """Wait until a condition holds without blocking the event loop."""
    await asyncio.to_thread(wait_until, condition, state)


def wait_until_idle(engine: AsyncLLM) -> None:
    scheduler = engine._engine.scheduler
    wait_until(lambda: not engine._streams and not scheduler.groups, "idle")
    assert_engine_idle(engine._engine)
    assert not engine._thread.num_tracked


async def collect(engine: AsyncLLM, request, params=None, **keys):
    """All deltas of a request, and the text of each completion."""
    deltas = [delta async for delta in engine.generate(request, params, **keys)]
    indices = sorted({delta.index for delta in deltas})
    return deltas, ["".join(delta.text for delta in deltas if delta.index == index) for index in indices]


class BlockedLoad:
    """A `load` function that blocks until `may_return` is set."""

    def __init__(self):
        self.is_reached, self.may_return = threading.Event(), threading.Event()

    def __call__(self, source):
        self.is_reached.set()
        assert self.may_return.wait(20)
        return load_image(source)
