"""`mmvllm demo`: a chat page for images and videos."""

import argparse
import asyncio
import logging
import signal
import time
from importlib.util import find_spec
from pathlib import Path

from mmvllm.cli.checks import check, print_bundled_notice, read_file
from mmvllm.cli.common import (
    add_completion_arguments,
    add_data_parallel_argument,
    add_max_waiting_argument,
    add_model_argument,
    add_release_argument,
    print_sampling_defaults,
)
from mmvllm.cli.media import LIMITS, add_media_options, media_policy
from mmvllm.cli.options import add_options, given_options
from mmvllm.cli.ports import listen, port
from mmvllm.config import EngineConfig
from mmvllm.demo.settings import DemoSettings
from mmvllm.processes.signals import ended_by_second_signal

GENERATED = ("max_images", "max_videos", "allow_special_tokens")  # options that are fields of DemoSettings
POLL_SECONDS = 0.1  # between checks for a signal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 accepts connections from other machines (default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=port,
        default=0,
        metavar="N",
        help="port to listen on; 0 chooses the first free one from 7860 (default: %(default)s)",
    )
    parser.add_argument("--share", action="store_true", help="create a public address through Gradio's servers")
    auth = parser.add_mutually_exclusive_group()
    auth.add_argument(
        "--auth",
        nargs="+",
        action="extend",
        default=[],
        metavar="USER:PASSWORD",
        help="require one of these logins; other users of this machine can see them on the command line",
    )
    auth.add_argument("--auth-file", type=Path, metavar="FILE", help="a file with one USER:PASSWORD per line")
    limits = parser.add_argument_group("limits")
    add_media_options(limits, LIMITS)
    add_options(limits, DemoSettings, GENERATED)
    add_max_waiting_argument(limits)
    add_release_argument(limits)
    add_completion_arguments(parser.add_argument_group("completions"), "greedy decoding")
    add_data_parallel_argument(parser)
    add_options(parser.add_argument_group("engine"), EngineConfig)


def run(args: argparse.Namespace) -> int:
    auth, policy = _users(args), media_policy(args)
    if find_spec("gradio") is None:
        raise ValueError('the page needs Gradio: pip install "mmvllm[demo]"')
    listen(args.host, args.port).close()
    check(args)
    print_bundled_notice(args)

    import uvicorn.config

    from mmvllm.demo.page import build_page
    from mmvllm.demo.theme import launch_options
    from mmvllm.entrypoints.async_llm import AsyncLLM
    from mmvllm.media.decoding import MediaDecoder

    engine = AsyncLLM(
        args.model,
        max_waiting=args.max_waiting,
        data_parallel_size=args.data_parallel_size,
        release_after=args.release_after,
        **given_options(args, EngineConfig),
    )
    print_sampling_defaults(args, engine.sampling_defaults)
    settings = DemoSettings(
        policy,
        uses_generation_config=args.generation_config == "auto",
        chat_template_kwargs=args.chat_template_kwargs or {},
        **given_options(args, DemoSettings, GENERATED),
    )
    # Gradio creates the server of a launched page. Its default protocol accepts heads of any size for any time, and the
    # server would log what clients send as warnings.
    uvicorn.config.HTTP_PROTOCOLS["auto"] = "mmvllm.server.http.connection:TimeLimitedProtocol"
    uvicorn.config.WS_PROTOCOLS["auto"] = None
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.levelno >= logging.ERROR)
    decoder = MediaDecoder(policy)
    with ended_by_second_signal():
        try:
            page = build_page(engine, settings, decoder)
            decoder.start()
            page.launch(
                server_name=args.host,
                server_port=args.port or None,  # None selects Gradio's range, from 7860
                share=args.share,
                auth=auth,
                prevent_thread_lock=True,
                quiet=True,
                state_session_capacity=page.state_session_capacity,
                **launch_options(page),
            )
            received = _received_signals()
            print(f"mmvllm demo: {page.share_url or page.local_url} (Ctrl-C ends it)", flush=True)
            while not received:
                time.sleep(POLL_SECONDS)
            page.close(verbose=False)
        finally:
            asyncio.run(engine.shutdown(drain=False))
            decoder.close()
    return 0


def _received_signals() -> list[int]:
    """Return a list to which each SIGINT or SIGTERM is added from now on."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    return received


def _users(args: argparse.Namespace) -> list[tuple[str, str]] | None:
    """Return the accepted logins; None accepts everyone."""
    lines = args.auth
    if args.auth_file is not None:
        lines = [line for line in map(str.strip, read_file("--auth-file", args.auth_file).splitlines()) if line]
        if not lines:
            raise ValueError(f"{args.auth_file} is empty; write USER:PASSWORD, one to a line")
    users = [(user.strip(), password.strip()) for user, _, password in (line.partition(":") for line in lines)]
    if not all(user and password for user, password in users):
        where = "--auth" if args.auth_file is None else f"{args.auth_file}: a line"
        raise ValueError(f"{where} is not USER:PASSWORD, neither of them empty")
    return users or None
