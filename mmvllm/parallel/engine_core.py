"""The engine core process: requests arrive through one pipe, and outputs leave through another.

commands ──> EngineCoreProc.run, the main thread ──> EngineThread ──> events
"""

import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from mmvllm.engine.engine_thread import EngineThread, Item, RequestEvent, is_last
from mmvllm.engine.gc_utils import freeze_gc
from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.engine.stats import EngineStats
from mmvllm.errors import RequestError, RequestFailed, first_line, without_frames
from mmvllm.inputs import EngineInput, in_pinned_memory
from mmvllm.processes.channel import Channel, can_be_sent, unpickled
from mmvllm.sampling_params import SamplingParams

REPORT_SECONDS = 1.0  # after which an engine without work reports: its rates go down


@dataclass(frozen=True, slots=True)
class EngineReady:
    """Sent once when the engine is ready, with its sizes."""

    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class AddCommand:
    """Add a request; outputs refer to it by `key`.

    `functions` are the pickled `logits_processors`, which `params` lacks: the process may be unable to import them.
    """

    key: int
    request_id: str
    num_completions: int
    prompt: EngineInput
    params: SamplingParams
    functions: bytes
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AbortCommand:
    """Abort a request."""

    key: int


@dataclass(frozen=True, slots=True)
class ResetCommand:
    """Empty the prefix cache."""


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Stop the engine."""


@dataclass(frozen=True, slots=True)
class StartupError:
    """The engine could not be created."""

    error: Exception


@dataclass(frozen=True, slots=True)
class EngineDead:
    """The engine has failed, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineOutputs:
    """New outputs of requests, by key, and the state of the engine."""

    items: list[tuple[int, Item]]
    stats: EngineStats
    failing: str | None


@dataclass(slots=True, eq=False)
class _FrontEndReceiver:
    """Receives the deltas of a request of the front-end process."""

    key: int
    request_id: str
    arrival_time: float
    num_completions: int
    ended: Future[None] = field(default_factory=Future)


class EngineCoreProc:
    """Runs an engine for the front-end process."""

    def __init__(self, engine: LLMEngine, channel: Channel, events: Connection, release_after: float | None):
        self._engine, self._channel, self._events = engine, channel, events
        self._sending = threading.Lock()
        self._receivers: dict[int, _FrontEndReceiver] = {}
        self._thread = EngineThread(engine, self._deliver, self._fail, release_after)

    def run(self) -> None:
        """Serve until the front-end process stops the engine, or ends."""
        engine = self._engine
        num_blocks = engine.scheduler.block_manager.num_blocks
        self._send(EngineReady(engine.max_model_len, engine.max_num_seqs, num_blocks, engine.block_size))
        try:
            while self._run_commands():
                pass
        except (EOFError, OSError):  # the front-end process has ended
            pass
        self._thread.stop()

    def _run_commands(self) -> bool:
        while not self._channel.pipe.poll(REPORT_SECONDS):
            self._report([])
        commands = self._channel.receive()
        self._channel.pipe.send(None)  # the memory may be written to again
        for command in commands:
            if isinstance(command, StopCommand):
                return False
            if isinstance(command, ResetCommand):
                self._thread.reset_prefix_cache()
            elif isinstance(command, AddCommand):
                self._add(command)
            elif (receiver := self._receivers.get(command.key)) is not None:  # else it has ended meanwhile
                self._thread.abort(receiver)
        return True

    def _add(self, command: AddCommand) -> None:
        options = command.options
        receiver = _FrontEndReceiver(command.key, command.request_id, options["arrival_time"], command.num_completions)
        self._receivers[command.key] = receiver
        try:  # here, so that the engine's thread need not
            params = _with_functions(command)
            self._engine.load_adapter(options.get("lora_request"))
        except ValueError as error:
            self._deliver([(receiver, error)])
            return
        except Exception as error:  # too little memory for it, for example: other requests are not affected
            self._deliver([(receiver, RequestFailed(f"preparation failed: {type(error).__name__}: {error}"))])
            return
        on_gpu = self._engine.device.type == "cuda"
        prompt = in_pinned_memory(command.prompt) if on_gpu else command.prompt
        self._thread.add(receiver, prompt, params, **options)

    def _deliver(self, events: list[RequestEvent]) -> None:
        items = []
        for receiver, item in events:
            items.append((receiver.key, item if not isinstance(item, Exception) else _sendable(item)))
            if is_last(item):
                self._receivers.pop(receiver.key, None)
        self._report(items)

    def _report(self, items: list[tuple[int, Item]]) -> None:
        self._send(EngineOutputs(items, self._thread.stats(0), self._thread.failing))

    def _fail(self, error: BaseException) -> None:
        self._send(EngineDead(first_line(error)))  # the front-end process then kills this one

    def _send(self, message: Any) -> None:
        with self._sending:
            self._events.send(message)


def not_sendable(error: Exception) -> RequestError:
    """The error for functions that cannot be pickled, or cannot be unpickled in an engine's process."""
    reason = f"logits_processors cannot be sent to the process of an engine: {first_line(error)}"
    return RequestError(f"{reason}; give functions of modules that it can import", param="logits_processors")


def _with_functions(command: AddCommand) -> SamplingParams:
    try:
        functions = unpickled(command.functions)
    except Exception as error:  # of the caller's module, too
        raise not_sendable(error) from None
    return replace(command.params, logits_processors=functions)


def run_engine_core(channel: Channel, events: Connection) -> None:
    """Load the engine and serve its requests."""
    try:
        folder, config, release_after = channel.receive()
        engine = LLMEngine(folder, config)
    except Exception as error:
        events.send(StartupError(_sendable(error)))
        sys.exit(1)
    with freeze_gc():
        EngineCoreProc(engine, channel, events, release_after).run()


def _sendable(error: Exception) -> Exception:
    """The error without its frames, or a RequestFailed with its text if it cannot be pickled."""
    return error if can_be_sent(without_frames(error)) else RequestFailed(first_line(error))
