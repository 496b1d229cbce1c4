"""Images that take long to decode are given up: after the time limit, and when their client has hung up."""

import time

import psutil
import pytest

from mmvllm.media.policy import MediaPolicy
from tests.helpers.media.hostile import slow_jpeg
from tests.helpers.serving.hang_ups import check_that_hang_ups_delay_nobody, decoding
from tests.helpers.serving.server import (
    CHAT,
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

# The image takes 3 to 15 seconds on two cores. In a process that has run thousands of tests, and where other processes
# compete for the cores, it can be decoded before this process has looked at the time again.
pytestmark = pytest.mark.slow
WORK = 0.6  # seconds, more than the start of a process takes


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
    wait_for(lambda: is_idle(engine) and not engine._preparation._num_preparing.total())


def test_clients_that_hang_up_do_not_delay_others(make_engine, slow):
    # The server shuts the engine down.
    check_that_hang_ups_delay_nobody(make_engine(), slow, MediaPolicy(image_timeout=300), WORK)


def test_a_server_that_shuts_down_does_not_wait_for_an_image(make_engine, slow):
    engine, others = make_engine(), {*psutil.Process().children()}
    with serving(engine, drain_seconds=0.1, media=MediaPolicy(image_timeout=300)) as running:
        client = running.connect()
        client.sendall(post(CHAT, slow))
        wait_for(lambda: decoding(others, WORK), 60)
        decoding(others, WORK)[0].suspend()
        start = time.monotonic()
    assert time.monotonic() - start < 15
    client.close()
