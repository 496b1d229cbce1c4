"""Several engines under test: small ones in processes, and a stand-in without any."""

import os
import signal
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.engine.engine_thread import Item
from mmvllm.engine.stats import EngineStats
from mmvllm.inputs import EngineInput
from mmvllm.outputs import CompletionOutput, Delta, RequestOutput
from mmvllm.parallel.dispatcher import Dispatcher
from mmvllm.parallel.engine_core import AddCommand, EngineOutputs, EngineReady

DATA_PARALLEL = {
    "dtype": "float32",
    "device": "cpu",
    "num_kvcache_blocks": 256,
    "data_parallel_size": 2,
    "max_num_seqs": 8,
}


def pids(engine: AsyncLLM) -> list[int]:
    """The ids of the engines' processes."""
    return engine._engine.pids


def kill(engine: AsyncLLM, index: int) -> None:
    os.kill(pids(engine)[index], signal.SIGKILL)


def only_seven(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that the process of an engine can import."""
    return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([7]), 0.0)


def slowly(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that makes a completion take at least 10 ms per token."""
    time.sleep(0.01)
    return logits


@dataclass(eq=False)
class FakeReceiver:
    """What gets the deltas of one request."""

    request_id: str
    arrival_time: float = 0.0
    num_completions: int = 1
    ended: Future = field(default_factory=Future)


@dataclass
class FakeEngines:
    """Engines without processes, whose commands are kept."""

    size: int = 2
    seed: int = 0
    has_ended: bool = False
    is_given_up: bool = False

    def __post_init__(self):
        self.ready_messages = tuple(EngineReady(1000, 4, 64, 16) for _ in range(self.size))
        self.sent = []  # (index, command)
        self.down: list[str | None] = [None] * self.size

    def listen(self, listener) -> None:
        self.listener = listener

    def send(self, index: int, command) -> None:
        self.sent.append((index, command))

    def reasons_down(self) -> list[str | None]:
        return self.down

    def has_failed(self) -> bool:
        return self.has_ended

    def give_up(self) -> None:
        self.is_given_up = True

    def lose(self, index: int, reason: str = "its process was ended by SIGKILL") -> None:
        self.down[index] = reason
        self.listener.on_lost(index, reason, None)

    def restore(self, index: int) -> None:
        self.down[index] = None
        self.listener.on_ready(index, self.ready_messages[index])

    def tell(self, index: int, *items: tuple[int, Item], **stats) -> None:
        self.listener.on_outputs(index, EngineOutputs([*items], EngineStats(num_blocks=64, **stats), None))


class Dispatched:
    """A dispatcher of fake engines, with what it delivered."""

    def __init__(self, size: int = 2):
        self.engines, self.events, self.failures = FakeEngines(size), [], []
        self.dispatcher = Dispatcher(self.engines, self.events.extend, self.failures.append)

    def add(self, name: str, prompt: list[int] | None = None, params: SamplingParams | None = None) -> FakeReceiver:
        receiver = FakeReceiver(name)
        ids = [1, 2, 3] if prompt is None else prompt
        self.dispatcher.add(receiver, EngineInput(ids), params or SamplingParams(), arrival_time=0.0)
        return receiver

    def added(self, index: int) -> list[str]:
        """The requests that an engine was given."""
        sent = self.engines.sent
        return [command.request_id for own, command in sent if own == index and isinstance(command, AddCommand)]

    def place(self, name: str) -> tuple[int, int]:
        """The engine that was given a request last, and the request's key."""
        added = [(index, command) for index, command in self.engines.sent if isinstance(command, AddCommand)]
        return next((index, command.key) for index, command in reversed(added) if command.request_id == name)

    def delivered(self, receiver: FakeReceiver) -> list[Item]:
        return [item for own, item in self.events if own is receiver]


def delta(text: str = "x", is_last: bool = False) -> Delta:
    output = RequestOutput("r", [CompletionOutput(text, [1], "eos")]) if is_last else None
    return Delta("r", 0, text, [1], None, "eos" if is_last else None, output)
