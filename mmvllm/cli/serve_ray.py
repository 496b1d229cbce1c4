"""`mmvllm serve --executor ray`: the options of a deployment on Ray Serve."""

import argparse
import os
from importlib.util import find_spec
from typing import Any

from mmvllm.cli.checks import check, print_bundled_notice
from mmvllm.cli.common import at_least_one
from mmvllm.cli.options import add_options, given_options, listed_options
from mmvllm.cli.ports import listen
from mmvllm.config import EngineConfig
from mmvllm.models.folder import check_model
from mmvllm.server.ray.options import RayServeOptions
from mmvllm.server.settings import ServerSettings

NEEDED = ("ray", "grpc", "aiohttp")  # packages of the extra


def add_ray_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="local: one engine in this process; ray: replicas on Ray Serve, on one or several machines (default: "
        "%(default)s)",
    )
    group.add_argument("--num-replicas", type=at_least_one, metavar="N", help="replicas of the engine (default: 1)")
    add_options(group, RayServeOptions)


def ray_options(args: argparse.Namespace) -> RayServeOptions | None:
    """Return the options of a deployment on Ray, or None for a server in this process; raise ValueError."""
    given = given_options(args, RayServeOptions)
    if args.num_replicas is not None:
        given = {"num_replicas": args.num_replicas} | given
    if args.executor == "local":
        if given:
            raise ValueError(f"{listed_options(given)} needs --executor ray")
        return None
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f'--executor ray needs {", ".join(missing)}; pip install "mmvllm[serve,ray]"')
    if args.keep_alive is not None:
        raise ValueError("--keep-alive needs --executor local: Ray runs another HTTP server")
    if args.demo:
        raise ValueError("--demo needs --executor local: the page keeps its conversations in one process")
    if args.release_after is not None:
        raise ValueError("--release-after needs --executor local: Ray Serve itself ends replicas that have no requests")
    return RayServeOptions(**_bounds(given))


def _bounds(given: dict[str, Any]) -> dict[str, Any]:
    number = given.pop("num_replicas", None)
    if number is not None:
        if "min_replicas" in given or "max_replicas" in given:
            raise ValueError("give --num-replicas, or --min-replicas and --max-replicas")
        return given | {"min_replicas": number, "max_replicas": number}
    if "min_replicas" in given and "max_replicas" not in given:
        raise ValueError("--min-replicas needs --max-replicas")
    return given


def run_on_ray(args: argparse.Namespace, options: RayServeOptions, settings: ServerSettings) -> int:
    """Serve until a signal ends the deployment."""
    check(args)
    if options.address == "local":  # a folder may be on the machines of a cluster only
        check_model(args.model, with_weights=args.load_format != "dummy")
    port = _port(args, options)
    print_bundled_notice(args)

    from mmvllm.server.ray.deployment import serve_on_ray
    from mmvllm.server.ray.replica import ReplicaSpec

    spec = ReplicaSpec(
        model=args.model,
        engine_args=given_options(args, EngineConfig),
        max_waiting=args.max_waiting,
        settings=settings,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        num_threads=options.cpus_per_replica,
        folder=os.getcwd(),
    )

    def tell() -> None:
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(f"{settings.model_names[0]} is served at http://{host}:{port}/v1")

    serve_on_ray(spec, options, args.host, port, args.drain_timeout, args.access_log, tell)
    return 0


def _port(args: argparse.Namespace, options: RayServeOptions) -> int:
    """Return the port, which must be free on this machine if Ray is started here; 0 chooses one."""
    if options.address == "local":
        with listen(args.host, args.port) as listener:
            return listener.getsockname()[1]
    if args.port == 0:
        raise ValueError("--port 0 chooses a port of this machine; a cluster needs the same port on all machines")
    return args.port
