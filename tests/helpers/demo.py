"""Values of the demo page's controls, and a decoder without processes."""

from collections.abc import Iterator
from contextlib import contextmanager

from mmvllm.demo.conversation import Options
from mmvllm.media import MediaPolicy
from mmvllm.processors.load_video import Load

OPTIONS = Options("", 0, 1, 0, 1, 900, -1, 3136, 20_000)


class InProcessDecoder:
    """As `MediaDecoder`, without its processes and its limits of time."""

    def __init__(self, policy: MediaPolicy):
        self._policy = policy

    @contextmanager
    def session(self) -> Iterator[Load]:
        yield Load(self._policy.load, self._policy.load_video)
