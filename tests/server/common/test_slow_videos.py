"""Videos that take long to fetch or to decode are given up: after the time limit, and when their client has hung up."""

import asyncio
import time

import psutil
import pytest

from mmvllm.media.policy import MediaPolicy
from mmvllm.server.common import media
from tests.helpers.media.hostile import slow_video
from tests.helpers.serving.hang_ups import check_that_hang_ups_delay_nobody, decoding
from tests.helpers.serving.server import (
    CHAT,
    call,
    chat,
    error_of,
    is_idle,
    make_app,
    post,
    serving,
    video_part,
    video_uri,
    wait_for,
)

URL = "messages[0].content[1].video_url.url"
PATIENT = MediaPolicy(video_timeout=300)

WORK = 1.5  # seconds, more than loading torch takes


@pytest.fixture(scope="module")
def slow() -> dict:
    """Takes more than ten seconds to decode on any machine."""
    return chat("Look", video_part(video_uri(slow_video())))


@pytest.mark.spawns
def test_a_video_over_the_time_limit_is_refused_by_name(engine, slow):
    others = {*psutil.Process().children()}
    app = make_app(engine, media=MediaPolicy(video_timeout=0.5))
    answer = call(app, "POST", CHAT, json=slow)
    assert answer.status_code == 400 and error_of(answer)["param"] == URL
    assert error_of(answer)["message"] == "video 0: the video took longer than 0.5 s to decode; cut or re-encode it"
    assert not decoding(others, WORK)  # its process was ended


@pytest.mark.spawns
def test_a_deadline_ends_decoding(engine, slow):
    app = make_app(engine, media=PATIENT, request_timeout=1)
    assert call(app, "POST", CHAT, json=slow).status_code == 504
    wait_for(lambda: is_idle(engine) and not engine._preparation._num_preparing.total())


def test_a_deadline_ends_fetching(engine, monkeypatch):
    cancelled = []

    async def never(*_):
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(True)

    monkeypatch.setattr(media, "fetch", never)
    answer = call(make_app(engine, request_timeout=0.05), "POST", CHAT, json=chat("a", video_part("http://slow/")))
    assert answer.status_code == 504 and cancelled


@pytest.mark.slow
def test_clients_that_hang_up_do_not_delay_others(make_engine, slow):
    # The server shuts the engine down.
    check_that_hang_ups_delay_nobody(make_engine(), slow, PATIENT, WORK)


@pytest.mark.slow
def test_a_server_that_shuts_down_does_not_wait_for_a_video(make_engine, slow):
    engine, others = make_engine(), {*psutil.Process().children()}
    with serving(engine, drain_seconds=0.1, media=PATIENT) as running:
        client = running.connect()
        client.sendall(post(CHAT, slow))
        wait_for(lambda: decoding(others, WORK), 60)
        decoding(others, WORK)[0].suspend()
        start = time.monotonic()
    assert time.monotonic() - start < 15
    client.close()
