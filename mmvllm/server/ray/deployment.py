"""Runs the server on Ray Serve: replicas of the application on one or more machines, behind Ray's HTTP proxy.

Ray routes requests, adds and drains replicas, and replaces those that die or whose engine fails. mmvllm must be
installed on all machines, and paths must be the same on them.
"""

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import ray
from ray import serve

from mmvllm.config import LARGE_STEPS, SMALL_STEPS
from mmvllm.errors import ArgumentError
from mmvllm.parallel import ray_session
from mmvllm.server.ray.options import RayServeOptions
from mmvllm.server.ray.replica import ReplicaSpec, replica_class

APP, ENGINE = "mmvllm", "engine"  # the names of the application in Ray Serve, and of its deployment
SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router"
logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the command prints what is served
HEALTH_SECONDS = 2.0  # between health checks; Ray replaces a replica after three failures
POLL_SECONDS = 1.0
END_SECONDS = 10.0  # for an application to end, in addition to the time for its requests to finish
MAX_OTHER_REQUESTS = 64  # for /health, /metrics and others, in addition to the requests of the engine


def serve_on_ray(
    spec: ReplicaSpec,
    options: RayServeOptions,
    host: str,
    port: int,
    drain_seconds: float,
    access_log: bool,
    on_ready: Callable[[], None],
) -> None:
    """Deploy the replicas and call `on_ready`; return once a SIGINT or SIGTERM has ended the deployment.

    Requests in flight have `drain_seconds` to finish, unless a second signal aborts them. Raises ValueError for options
    that do not fit the cluster or a model that cannot be loaded, and RuntimeError if the deployment is lost.
    """
    resources = {"CPU": options.cpus_per_replica, "GPU": ray_session.gpus_per_engine(spec.engine_args)}
    routing = _routing(options)
    ray_session.start(options.address, options.max_replicas * options.cpus_per_replica)
    try:
        if missing := ray_session.missing_resources(options.min_replicas, "replica", resources):
            raise ValueError(missing[0])
        deployment = serve.deployment(replica_class(spec)).options(
            name=ENGINE,
            ray_actor_options={"num_cpus": resources["CPU"], "num_gpus": resources["GPU"]},
            graceful_shutdown_wait_loop_s=POLL_SECONDS,
            graceful_shutdown_timeout_s=drain_seconds,
            health_check_period_s=HEALTH_SECONDS,
            max_constructor_retry_count=1,
            logging_config={"enable_access_log": access_log},
            **_numbers(spec, options),
            **routing,
        )
        with _interruptible():
            serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
            _run(deployment.bind(), drain_seconds, on_ready)
    finally:
        ray.shutdown()


def _routing(options: RayServeOptions) -> dict[str, Any]:
    if not options.session_affinity:
        return {}  # by default, Ray chooses the less busy of two replicas
    if find_spec(SESSION_ROUTER) is None:
        message = "{session_affinity} needs the router " + f"{SESSION_ROUTER}, which Ray {ray.__version__} lacks"
        raise ArgumentError(message)
    return {"request_router_config": {"request_router_class": f"{SESSION_ROUTER}.ConsistentHashRouter"}}


def _numbers(spec: ReplicaSpec, options: RayServeOptions) -> dict[str, Any]:
    """Return the numbers of replicas and requests for Ray; the engine refuses requests beyond its limits itself."""
    given = spec.engine_args.get("max_num_seqs")
    most = spec.max_waiting + (given or LARGE_STEPS["max_num_seqs"])
    scaling = {
        "min_replicas": options.min_replicas,
        "max_replicas": options.max_replicas,
        "target_ongoing_requests": given or SMALL_STEPS["max_num_seqs"],
    }
    fixed = options.min_replicas == options.max_replicas
    replicas = {"num_replicas": options.min_replicas} if fixed else {"autoscaling_config": scaling}
    return replicas | {"max_ongoing_requests": most + MAX_OTHER_REQUESTS}


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, even if Ray or a shell has set other handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(app: serve.Application, drain_seconds: float, on_ready: Callable[[], None]) -> None:
    """Deploy the application, and delete it after a signal."""
    try:
        try:
            serve.run(app, name=APP, route_prefix="/")
        except RuntimeError as error:
            raise ValueError(f"the replicas cannot start: {_reason() or error}") from None
        on_ready()
        while APP in serve.status().applications:
            time.sleep(POLL_SECONDS)
        raise RuntimeError("the deployment was deleted by another program")
    except KeyboardInterrupt:
        message = "shutting down: finishing the requests in flight; interrupt again to abort them"
        print(message, file=sys.stderr, flush=True)
    finally:
        with suppress(KeyboardInterrupt):
            _delete(drain_seconds)


def _reason() -> str:
    """Return why the replicas did not start: the last line of the traceback that Ray keeps, or ""."""
    application = serve.status().applications.get(APP)
    messages = [state.message for state in application.deployments.values()] if application else []
    return "".join(messages).rstrip().rpartition("\n")[2]


def _delete(drain_seconds: float) -> None:
    """Delete the application, and wait until its replicas have ended."""
    serve.delete(APP, _blocking=False)
    deadline = time.monotonic() + drain_seconds + END_SECONDS
    while APP in serve.status().applications and time.monotonic() < deadline:
        time.sleep(0.1)
