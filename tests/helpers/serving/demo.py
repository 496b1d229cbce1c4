"""Values of the demo page's controls, a decoder without processes, and work that is counted."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from mmvllm.demo.conversation import Options
from mmvllm.media.policy import MediaPolicy
from mmvllm.processors.videos.load import Load

OPTIONS = Options("", 0, 1, 0, 1, 900, -1, 3136, 20_000)


class InProcessDecoder:
    """A `MediaDecoder` without processes and time limits."""

    def __init__(self, policy: MediaPolicy):
        self._policy = policy

    @contextmanager
    def session(self) -> Iterator[Load]:
        yield Load(self._policy.load, self._policy.load_video)


class Work:
    """Work that takes some turns of the event loop; `peak` is how much of it there was at a time."""

    def __init__(self):
        self._at_work = self.peak = 0

    async def do(self) -> None:
        self._at_work += 1
        self.peak = max(self.peak, self._at_work)
        for _ in range(5):
            await asyncio.sleep(0)
        self._at_work -= 1
