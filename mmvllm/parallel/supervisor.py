"""Restarts a dead engine process, with exponential backoff."""

import logging
import threading
import time
from typing import Protocol

from mmvllm.errors import first_line
from mmvllm.parallel.engine_core import AddCommand, EngineDead, EngineOutputs, EngineReady, StartupError
from mmvllm.parallel.engine_core_client import STOP_SECONDS, Command, EngineCoreClient, Setup

logger = logging.getLogger(__name__)

INITIAL_BACKOFF, MAX_BACKOFF = 0.5, 60.0  # seconds; doubles with each crash
STABLE_SECONDS = 60.0  # from its start, after which the end of a process resets the backoff


class EngineListener(Protocol):
    """Callbacks about engine `index`, from its supervisor's thread; `on_unsendable` from its client's."""

    def on_ready(self, index: int, ready: EngineReady) -> None: ...

    def on_outputs(self, index: int, outputs: EngineOutputs) -> None: ...

    def on_unsendable(self, index: int, command: AddCommand, error: Exception) -> None: ...

    def on_lost(self, index: int, reason: str, startup_error: Exception | None) -> None:
        """A process has ended; `startup_error` is the error if the engine could not be created."""
        ...


class EngineSupervisor:
    """Runs one engine of several: a thread starts its process, reads its messages, and restarts it.

    Args:
        setup: the model's folder, the `EngineConfig`, and `EngineThread`'s `release_after`.
        env: environment variables of each process, of the engine's `Placement`.
    """

    def __init__(self, index: int, setup: Setup, env: dict[str, str], listener: EngineListener):
        self.num_failed_starts = 0  # one after the other
        self._index, self._setup, self._env, self._listener = index, setup, env, listener
        self._changed = threading.Condition()
        self._engine: EngineCoreClient | None = None
        self._is_ready = self._is_exiting = False
        self._num_crashes = 0  # consecutive processes that ended soon after their start
        self._thread = threading.Thread(target=self._run, name=f"mmvllm-engine-{index}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the current or the last process."""
        engine = self._engine
        return None if engine is None else engine.process.pid

    def send(self, command: Command) -> None:
        """Send a command to the running process; it is lost if the process dies, which the listener is told."""
        self._engine.send(command)

    def stop(self) -> None:
        """Ask the process to end, and do not restart it; `join` waits for it."""
        with self._changed:
            self._is_exiting = True
            if self._is_ready:
                self._engine.stop()
            elif self._engine is not None:  # nothing is in flight
                self._engine.kill()
            self._changed.notify_all()

    def join(self, until: float) -> None:
        """Wait for the process until this time, then kill it."""
        with self._changed:
            engine = self._engine
        if engine is not None:
            engine.process.join(max(0.0, until - time.monotonic()))
            engine.kill()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._is_exiting:
            started, self._is_ready = time.monotonic(), False
            reason, startup_error = self._run_once()
            self.num_failed_starts = 0 if self._is_ready else self.num_failed_starts + 1
            self._num_crashes = 0 if time.monotonic() - started > STABLE_SECONDS else self._num_crashes + 1
            if not self._is_exiting:
                self._listener.on_lost(self._index, reason, startup_error)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_exiting, backoff_seconds(self._num_crashes))

    def _run_once(self) -> tuple[str, Exception | None]:
        """Start a process and read what it sends; why it ended."""
        engine = None
        try:
            engine = self._start()
            return self._follow(engine)
        except Exception as error:  # no process can be started, or a bug: it must not end this thread
            logger.exception("engine %d", self._index)
            return first_line(error), None
        finally:
            if engine is not None:
                engine.kill()
                engine.close()

    def _start(self) -> EngineCoreClient:
        with self._changed:
            engine = EngineCoreClient(self._setup, self._env, self._on_unsendable)
            self._engine = engine
            if self._is_exiting:
                engine.kill()
        return engine

    def _follow(self, engine: EngineCoreClient) -> tuple[str, Exception | None]:
        for message in engine.messages():
            if isinstance(message, EngineOutputs):
                self._listener.on_outputs(self._index, message)
            elif isinstance(message, EngineReady):
                self._is_ready = True
                self._listener.on_ready(self._index, message)
            elif isinstance(message, StartupError):
                return first_line(message.error), message.error
            elif isinstance(message, EngineDead):
                return message.reason, None
        return engine.kill(), None

    def _on_unsendable(self, command: AddCommand, error: Exception) -> None:
        self._listener.on_unsendable(self._index, command, error)


def backoff_seconds(num_crashes: int) -> float:
    """Seconds to wait before the next restart."""
    return min(MAX_BACKOFF, INITIAL_BACKOFF * 2.0 ** min(num_crashes, 30))
