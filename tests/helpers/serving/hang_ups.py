"""Clients that hang up while worker processes decode what they sent."""

import psutil

from mmvllm import AsyncLLM
from mmvllm.media.policy import MediaPolicy
from tests.helpers.serving.server import CHAT, SCENES, chat, data_uri, image_part, is_idle, post, serving, wait_for


def decoding(others: set[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Processes that have decoded for a while, given their seconds of work by then, and started after `others`."""
    return [one for one in {*psutil.Process().children()} - others if one.cpu_times().user > seconds]


def check_that_hang_ups_delay_nobody(engine: AsyncLLM, slow: dict, policy: MediaPolicy, seconds: float) -> None:
    """Four clients send `slow` and hang up while it is decoded; another is answered, and the processes end."""
    others = {*psutil.Process().children()}
    body, normal = post(CHAT, slow), chat("Look", image_part(data_uri(SCENES[0])), max_tokens=1)
    with serving(engine, media=policy) as running:
        clients = [running.connect() for _ in range(4)]
        for client in clients:
            client.sendall(body)
        wait_for(lambda: engine.stats().num_preparing == 4 and decoding(others, seconds), 60)
        stopped = decoding(others, seconds)
        for process in stopped:
            process.suspend()  # it would decode for ever
        for client in clients:
            client.close()
        answer = running.client().chat.completions.create(**normal)
        assert answer.usage.completion_tokens == 1
        wait_for(lambda: is_idle(engine) and not any(process.is_running() for process in stopped), 60)
