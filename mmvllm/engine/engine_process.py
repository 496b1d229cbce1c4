"""How the process of an engine begins; it imports torch only once the number of threads is chosen."""

import os
from multiprocessing.connection import Connection

from mmvllm.worker_channel import Channel, SharedBuffer
from mmvllm.worker_process import ONE_THREAD, follow_parent


def run_engine(commands: Connection, shared: SharedBuffer | None, events: Connection, num_threads: int) -> None:
    """Load an engine, of which the model and the `EngineConfig` come first, then serve requests."""
    follow_parent()
    os.environ.update(dict.fromkeys(ONE_THREAD, str(num_threads)))
    from mmvllm.engine.engine_host import host_engine

    host_engine(Channel(commands, shared), events, num_threads)
