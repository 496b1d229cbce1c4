"""Images that take long to decode are given up: after the time limit, and when their client has hung up."""

import time

import psutil
import pytest

from mmvllm.media import MediaPolicy
from tests.helpers.hostile import slow_jpeg
from tests.helpers.server import (
    CHAT,
    SCENES,
    call,
    chat,
    data_uri,
    error_of,
    image_part,
    is_idle,
    make_app,
    post,
    serving,
    wait_for,
)


@pytest.fixture(scope="module")
def slow() -> dict:
    """Takes seconds to decode on any machine, and about 15 on two shared cores."""
    return chat("Look", image_part(data_uri(slow_jpeg())))


def test_an_image_over_the_time_limit_is_refused_by_name(engine, slow):
    app = make_app(engine, media=MediaPolicy(image_timeout=0.5))
    answer = call(app, "POST", CHAT, json=slow)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "messages[0].content[1].image_url.url"
    assert error_of(answer)["message"] == (
        "image 0: the image took longer than 0.5 s to decode; shrink or re-encode it"
    )


def test_a_deadline_ends_decoding(engine, slow):
    app = make_app(engine, media=MediaPolicy(image_timeout=300), request_timeout=1)
    assert call(app, "POST", CHAT, json=slow).status_code == 504
    wait_for(lambda: is_idle(engine) and not engine._preparation._num_preparing)


def decoding(others: set[psutil.Process]) -> list[psutil.Process]:
    """Processes that have decoded for a while, which were started after `others`."""
    return [one for one in {*psutil.Process().children()} - others if one.cpu_times().user > 0.6]


def test_clients_that_hang_up_do_not_delay_others(make_engine, slow):
    engine, others = make_engine(), {*psutil.Process().children()}  # the server shuts the engine down
    body, normal = post(CHAT, slow), chat("Look", image_part(data_uri(SCENES[0])), max_tokens=1)
    with serving(engine, media=MediaPolicy(image_timeout=300)) as running:
        clients = [running.connect() for _ in range(4)]
        for client in clients:
            client.sendall(body)
        wait_for(lambda: engine.stats().num_preparing == 4 and decoding(others), 60)
        stopped = decoding(others)
        for process in stopped:
            process.suspend()  # it would decode for ever
        for client in clients:
            client.close()
        answer = running.client().chat.completions.create(**normal)
        assert answer.usage.completion_tokens == 1
        wait_for(lambda: is_idle(engine) and not any(process.is_running() for process in stopped), 60)


def test_a_server_that_shuts_down_does_not_wait_for_an_image(make_engine, slow):
    engine, others = make_engine(), {*psutil.Process().children()}
    with serving(engine, drain_seconds=0.1, media=MediaPolicy(image_timeout=300)) as running:
        client = running.connect()
        client.sendall(post(CHAT, slow))
        wait_for(lambda: decoding(others), 60)
        decoding(others)[0].suspend()
        start = time.monotonic()
    assert time.monotonic() - start < 15
    client.close()
