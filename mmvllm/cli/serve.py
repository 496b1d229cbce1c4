"""`mmvllm serve`: an OpenAI-compatible HTTP server."""

import argparse
import os
import re
from importlib.util import find_spec

from mmvllm.cli.checks import check, print_bundled_notice
from mmvllm.cli.common import (
    add_completion_arguments,
    add_data_parallel_argument,
    add_max_waiting_argument,
    add_model_argument,
    add_release_argument,
    print_sampling_defaults,
    seconds,
)
from mmvllm.cli.media import OPTIONS, add_media_options, media_policy
from mmvllm.cli.options import add_options, given_options
from mmvllm.cli.ports import listen, port
from mmvllm.cli.serve_ray import add_ray_arguments, ray_options, run_on_ray
from mmvllm.cli.vllm_options import add_vllm_options, print_unused_options
from mmvllm.config import EngineConfig
from mmvllm.entrypoints.tracing import check_endpoint
from mmvllm.media.policy import MediaPolicy
from mmvllm.models.folder import model_name
from mmvllm.processes.signals import ended_by_second_signal
from mmvllm.server.settings import ServerSettings
from mmvllm.utils.arguments import check_key
from mmvllm.utils.text import parse_json

# The fields of ServerSettings that are options, in three groups.
HTTP_FIELDS = ("allow_lora_updating", "ignore_unknown_fields", "enable_tokenizer_info_endpoint", "demo")
OBSERVABILITY_FIELDS = ("metrics_names", "enable_force_include_usage", "enable_per_request_metrics")
LIMIT_FIELDS = (
    *("request_timeout", "scheduling_policy", "max_images", "max_videos", "max_pixels", "max_body_bytes"),
    *("body_timeout", "max_bodies_bytes", "max_stored_bytes", "max_kept_media_bytes", "stored_seconds"),
    *("allow_special_tokens", "trust_request_chat_template"),
)
GENERATED = HTTP_FIELDS + OBSERVABILITY_FIELDS + LIMIT_FIELDS
KEY_VARIABLE = "MMVLLM_API_KEY"
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    _add_http(parser.add_argument_group("HTTP server"))
    _add_limits(parser.add_argument_group("limits of requests"))
    _add_observability(parser.add_argument_group("observability"))
    add_ray_arguments(parser.add_argument_group("where to run"))
    add_completion_arguments(parser.add_argument_group("completions"), "temperature 1, as OpenAI's")
    add_media_options(parser.add_argument_group("untrusted media"))
    add_data_parallel_argument(parser)
    add_options(parser.add_argument_group("engine"), EngineConfig)
    add_vllm_options(parser)


def _add_http(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"
    )
    group.add_argument(
        "--port",
        type=port,
        default=8000,
        metavar="N",
        help="port to listen on; 0 chooses a free one (default: %(default)s)",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="model name in requests; several for clients that require a certain name (default: the value of --model)",
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="require one of these API keys, except for health, ping, load, metrics, version and the demo page. Other "
        f"users of this machine can see them; they cannot see a key in the environment variable {KEY_VARIABLE}",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow requests of web pages from this origin, such as https://example.org, or * for all; may be repeated",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=DIR",
        help="serve LoRA adapters, folders as PEFT saves them, as models of these names; needs --enable-lora",
    )
    add_options(group, ServerSettings, HTTP_FIELDS)
    group.add_argument(
        "--keep-alive",
        type=seconds,
        metavar="S",
        help="seconds until an idle connection is closed; a proxy in front must close its own earlier (default: 75)",
    )
    group.add_argument(
        "--drain-timeout",
        type=seconds,
        default=30.0,
        metavar="S",
        help="seconds to finish requests in flight after a signal to stop (default: %(default)g)",
    )


def _add_observability(group: argparse._ArgumentGroup) -> None:
    add_options(group, ServerSettings, OBSERVABILITY_FIELDS)
    group.add_argument("--access-log", action="store_true", help="log a line per HTTP request to standard error")
    group.add_argument(
        "--log-requests",
        nargs="?",
        const="facts",
        choices=("facts", "full"),
        help="log a line per completion request when it ends, to standard error: its id, tokens, times and finish "
        "reasons as JSON; with full, also the beginning of its texts, which are otherwise never logged",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a trace of each request to this OpenTelemetry collector, such as http://localhost:4318 (OTLP over "
        "HTTP; needs the extra otel)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add_max_waiting_argument(group)
    add_release_argument(group)
    add_options(group, ServerSettings, LIMIT_FIELDS)


def run(args: argparse.Namespace) -> int:
    _check_installed(args)
    if args.model_tag is not None and args.model is not None:
        raise ValueError(f"the model is named twice: {args.model_tag} and --model {args.model}; leave one of them out")
    args.model = args.model_tag or args.model
    _check_swallowed(args)
    print_unused_options(args)
    media, keys = media_policy(args), _api_keys(args)
    _check_origins(args.cors_origin)
    modules = _lora_modules(args)
    check_endpoint(args.otlp_traces_endpoint)
    ray = ray_options(args)
    if ray is not None:
        return run_on_ray(args, ray, _settings(args, model_name(args.model), keys, media, modules))
    with listen(args.host, args.port) as listener:
        check(args)
        print_bundled_notice(args)

        from mmvllm.engine.gc_utils import freeze_gc
        from mmvllm.entrypoints.async_llm import AsyncLLM
        from mmvllm.server.app import build_app
        from mmvllm.server.run import KEEP_ALIVE_SECONDS, make_server

        engine = AsyncLLM(
            args.model,
            otlp_traces_endpoint=args.otlp_traces_endpoint,
            max_waiting=args.max_waiting,
            data_parallel_size=args.data_parallel_size,
            release_after=args.release_after,
            trusts_grammars=False,
            **given_options(args, EngineConfig),
        )
        print_sampling_defaults(args, engine.sampling_defaults)
        settings = _settings(args, engine.model, keys, media, modules)

        def tell(url: str) -> None:
            page = f", with a page at {url}/demo/" if args.demo else ""
            print(f"{settings.model_names[0]} is served at {url}/v1{page}")

        app = build_app(engine, settings)
        server = make_server(
            app, engine, args.drain_timeout, args.access_log, tell, args.keep_alive or KEEP_ALIVE_SECONDS
        )
        with freeze_gc(), ended_by_second_signal():
            server.run([listener])
    return 0


def _check_swallowed(args: argparse.Namespace) -> None:
    """Raise ValueError if an option with several values has taken the model that follows it as one of them."""
    for option, values in (("--api-key", args.api_key), ("--served-model-name", args.served_model_name)):
        last = values[-1] if len(values) > 1 else ""
        if args.model is None and (os.path.isdir(last) or re.fullmatch(r"[\w.-]+/[\w.-]+", last)):
            raise ValueError(f"the last value of {option} looks like a model; name the model first, or with --model")


def _settings(
    args: argparse.Namespace, model: str, keys: tuple[str, ...], media: MediaPolicy, modules: dict[str, str]
) -> ServerSettings:
    return ServerSettings(
        model_names=tuple(args.served_model_name) or (model,),
        api_keys=keys,
        cors_origins=tuple(args.cors_origin),
        media=media,
        media_names=OPTIONS,
        chat_template_kwargs=args.chat_template_kwargs or {},
        uses_generation_config=args.generation_config == "auto",
        lora_modules=modules,
        log_requests=args.log_requests,
        **given_options(args, ServerSettings, GENERATED),
    )


def _lora_modules(args: argparse.Namespace) -> dict[str, str]:
    """Return the folders of adapters by name."""
    option = "--lora-modules" if args.lora_modules else "--allow-lora-updating" if args.allow_lora_updating else None
    if option is not None and not args.enable_lora:
        raise ValueError(f"{option} needs --enable-lora")
    modules: dict[str, str] = {}
    for given in args.lora_modules:
        name, path = _lora_module(given)
        if name in modules:
            raise ValueError(f"--lora-modules has the name {name!r} twice")
        modules[name] = path
    return modules


def _lora_module(given: str) -> tuple[str, str]:
    """Return the name and the folder of an adapter, from NAME=DIR or from the JSON object that vLLM takes as well."""
    if given.startswith("{"):
        try:
            record = parse_json(given)
        except ValueError:
            record = {}
        name, path = record.get("name"), record.get("path")
    else:
        name, _, path = given.partition("=")
    if not all(isinstance(value, str) and value for value in (name, path)):
        raise ValueError(f'--lora-modules: {given!r} must be NAME=DIR, or {{"name": "NAME", "path": "DIR"}}')
    return name, path


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    given = [("--api-key", key) for key in args.api_key]
    given += [(KEY_VARIABLE, key) for key in [os.environ.get(KEY_VARIABLE)] if key is not None]
    return tuple(check_key(source, key) for source, key in given)


def _check_origins(origins: list[str]) -> None:
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/]+", origin):
            raise ValueError(f"--cors-origin: {origin!r} is not an origin; write https://example.org, or * for all")


def _check_installed(args: argparse.Namespace) -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f'{", ".join(missing)} is not installed; pip install "mmvllm[serve]"')
    if args.demo and find_spec("gradio") is None:
        raise ValueError('--demo needs gradio; pip install "mmvllm[demo]"')
