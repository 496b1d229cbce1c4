"""How the process of an engine begins; it imports torch only once its threads and devices are chosen."""

from ctypes import c_uint64
from multiprocessing.connection import Connection

from mmvllm.processes.channel import Channel, SharedBuffer
from mmvllm.processes.worker import beating, begin_engine


def run_engine(
    commands: Connection, shared: SharedBuffer | None, events: Connection, env: dict[str, str], pulse: c_uint64
) -> None:
    """Load an engine, of which the model and the `EngineConfig` come first, then serve requests.

    `env` has the environment variables of its `Placement`.
    """
    begin_engine(env)
    with beating(pulse):
        from mmvllm.parallel.engine_core import run_engine_core

        run_engine_core(Channel(commands, shared), events)
