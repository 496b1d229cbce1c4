"""Starts Ray on this machine, or joins a cluster, and asks it for the resources of engines.

Ray's messages go only to its own log files.
"""

import logging
import os
import socket
from typing import Any

from mmvllm.config import EngineConfig
from mmvllm.errors import ArgumentError
from mmvllm.utils.text import counted

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


def gpus_per_engine(engine_args: dict[str, Any], given: float | None = None) -> float:
    """The GPUs of an actor with an engine: what is `given`; by default one for each rank, or 0 on a CPU.

    All resources of an actor are on one machine, so its ranks need no placement group. Raises ArgumentError for a
    device with a number, because Ray chooses it.
    """
    device = str(engine_args.get("device", "auto"))
    if ":" in device:
        raise ArgumentError("{device} is {value!r}, but Ray chooses each engine's GPUs; give 'cuda'", value=device)
    if given is not None:
        return given
    # For "cuda" this machine is not asked: it may have no GPU where the cluster has some.
    on_gpu = device == "cuda" or EngineConfig.from_arguments("LLM", **engine_args).resolve_device().type == "cuda"
    return engine_args.get("tensor_parallel_size", 1) if on_gpu else 0


def missing_resources(number: int, noun: str, each: dict[str, float]) -> list[str]:
    """Describe the resources that Ray lacks for this number of actors; it would wait for them forever."""
    import ray  # an optional package

    available, missing = ray.cluster_resources(), []
    for name, share in each.items():
        if share * number > (found := available.get(name, 0)):
            needed = f"{share * number:g} {name} requested for {counted(number, noun)}, {share:g} each"
            missing.append(f"{needed}; Ray has {found:g}")
    return missing


def _check_reachable(address: str) -> None:
    """Fail at once if no cluster responds; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise ValueError(f"address {address}: no Ray cluster answers there ({error})") from None
