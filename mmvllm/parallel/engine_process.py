"""Entry point of an engine core process; torch is imported only after threads and devices are set."""

from ctypes import c_uint64
from multiprocessing.connection import Connection

from mmvllm.processes.channel import Channel, SharedBuffer
from mmvllm.processes.worker import beating, begin_engine


def run_engine(
    commands: Connection, shared: SharedBuffer | None, events: Connection, env: dict[str, str], pulse: c_uint64
) -> None:
    """Receive the model and the `EngineConfig`, load the engine, and serve requests.

    `env` has the environment variables of the engine's `Placement`.
    """
    begin_engine(env)
    with beating(pulse):
        from mmvllm.parallel.engine_core import run_engine_core

        run_engine_core(Channel(commands, shared), events)
