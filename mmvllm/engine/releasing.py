"""An engine whose memory is given back while it has nothing to do, and which is loaded again for the next request."""

import logging
import time
from collections.abc import Callable

from mmvllm.engine.gc_utils import collect_everything
from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.errors import RequestFailed, first_line

logger = logging.getLogger(__name__)


class ReleasableEngine:
    """Used by the thread that owns the engine; others may read `engine` and `is_released`.

    A released engine has freed its weights, its caches and its further processes. What is known of its model stays.

    Args:
        after: seconds without work after which it is released; None keeps it.
        on_made: called with each engine, before it gets requests.
    """

    def __init__(self, engine: LLMEngine, after: float | None, on_made: Callable[[LLMEngine], None]):
        self.engine, self.is_released = engine, False
        self.failure: str | None = None  # why it could not be loaded again, when that was tried last
        self._after, self._on_made = after, on_made
        on_made(engine)

    @property
    def seconds_to_wait(self) -> float | None:
        """For work, before `release` is to be called; None waits for ever."""
        return None if self.is_released else self._after

    def release(self) -> None:
        """Free the memory; the engine must have no requests."""
        self.is_released = True
        self.engine.exit()
        collect_everything(self.engine.device)
        logger.info("the engine has had no request for %g s and has released its memory", self._after)

    def load(self) -> None:
        """Make the engine anew if it is released; raises RequestFailed if that fails, and may be called again."""
        if not self.is_released:
            return
        begin, self.failure = time.perf_counter(), None
        try:
            engine = self.engine.made_again()
        except Exception as error:  # for example because another program has taken the memory meanwhile
            self.failure = f"the released model cannot be loaded again: {first_line(error)}"
        if self.failure is not None:  # outside: the error's frames hold what was loaded
            collect_everything(self.engine.device)
            raise RequestFailed(self.failure)
        self._on_made(engine)
        self.engine, self.is_released = engine, False
        logger.info("the released engine was loaded again in %.1f s", time.perf_counter() - begin)
