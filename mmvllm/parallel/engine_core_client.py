"""The front-end process's client of an engine core process (`engine_core.py`)."""

import multiprocessing
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmvllm.config import EngineConfig
from mmvllm.parallel.engine_core import AbortCommand, AddCommand, ResetCommand, StopCommand
from mmvllm.parallel.engine_process import run_engine
from mmvllm.processes.channel import Channel, PackedMessage, SharedBuffer
from mmvllm.processes.signals import kill_process
from mmvllm.processes.start import start_process
from mmvllm.processes.watchdog import Watch, Watched, new_pulse

STOP_SECONDS = 5.0  # for the step that runs, and for further ranks to end
BATCH_COMMANDS = 64  # sent together
BATCH_BYTES = 64 << 20  # of their patches: what does not fit the shared memory goes through the pipe

Setup = tuple[Path, EngineConfig, float | None]
Command = AddCommand | AbortCommand | ResetCommand | StopCommand


class EngineCoreClient:
    """Starts an engine core process, which ends with this one, or if it shows no sign of life for `step_timeout`.

    Args:
        setup: the model's folder, the `EngineConfig`, and `EngineThread`'s `release_after`.
        env: environment variables of the process, of its `Placement`.
        on_unsendable: called in a thread with a request that cannot be pickled, and why.
    """

    def __init__(self, setup: Setup, env: dict[str, str], on_unsendable: Callable[[AddCommand, Exception], None]):
        pipe, commands = multiprocessing.Pipe()
        self._events, events = multiprocessing.Pipe(duplex=False)
        shared = SharedBuffer.create()
        self._channel, self._on_unsendable = Channel(pipe, shared), on_unsendable
        pulse, arguments = new_pulse(), (commands, shared, events, env)
        self.process = start_process(run_engine, (*arguments, pulse), is_daemon=False)  # it may have ranks
        commands.close()
        events.close()
        with suppress(OSError):  # the process has ended
            self._channel.send(setup)
        self._changed = threading.Condition()
        self._queued: deque[Command] = deque()
        self._is_closed = False
        threading.Thread(target=self._send_all, name="mmvllm-send", daemon=True).start()
        self._watch = Watch(Watched("its process", self.process, pulse), setup[1].step_timeout)

    def send(self, command: Command) -> None:
        """Queue a command, which a thread sends; it is dropped if the process has ended."""
        with self._changed:
            self._queued.append(command)
            self._changed.notify()

    def messages(self) -> Iterator[Any]:
        """Yield the messages of the process until it ends."""
        with suppress(EOFError, OSError):
            while True:
                yield self._events.recv()

    def stop(self) -> None:
        """Ask the process to end after the current step; `kill` it after `STOP_SECONDS`."""
        self.send(StopCommand())

    def kill(self) -> str:
        """Kill the process if it still runs, and return how it ended."""
        kill_process(self.process)
        return self._watch.end()

    def close(self) -> None:
        """Release the resources of a process that has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _send_all(self) -> None:
        with suppress(EOFError, OSError):  # the process has ended
            while batch := self._next_batch():
                for message in self._packed(batch):
                    self._channel.send_packed(message)
                    self._channel.pipe.recv()  # the process has copied what is in the shared memory
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed)
        self._channel.close()
        self._events.close()

    def _next_batch(self) -> list[Command]:
        """The next commands to send together; empty once the client is closed."""
        batch, num_bytes = [], 0
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._is_closed)
            while self._queued and len(batch) < BATCH_COMMANDS and num_bytes < BATCH_BYTES and not self._is_closed:
                batch.append(self._queued.popleft())
                num_bytes += batch[-1].prompt.num_bytes if isinstance(batch[-1], AddCommand) else 0
        return batch

    def _packed(self, batch: list[Command]) -> Iterator[PackedMessage]:
        """Pack the commands into one message, or into one each if some command cannot be pickled."""
        try:
            together = PackedMessage(batch)
        except Exception as error:
            if len(batch) == 1:
                self._on_unsendable(batch[0], error)
                return
            for command in batch:
                yield from self._packed([command])
        else:
            yield together
