"""Starts Ray on this machine, or joins a cluster; its messages go only to its own log files."""

import logging
import os
import socket

OBJECT_STORE_BYTES = 256 * 1024 * 1024  # it holds only paths and captions, or pieces of requests


def start(address: str, num_cpus: int) -> None:
    """Start Ray for this process with this number of CPU cores if the address is "local"; otherwise join a cluster.

    Raises ValueError if no cluster responds.
    """
    import ray  # an optional package

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address != "local":
        _check_reachable(address)
        ray.init(address, **quiet)
        return
    ray.init("local", num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, **quiet)


def _check_reachable(address: str) -> None:
    """Fail at once if no cluster responds; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise ValueError(f"address {address}: no Ray cluster answers there ({error})") from None
