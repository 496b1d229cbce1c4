"""Media that take long to fetch or to decode are given up: after the time limit, and when their client has hung up."""

import asyncio
import time
from dataclasses import dataclass

import psutil
import pytest

from mmvllm.media.policy import MediaPolicy
from mmvllm.server.common import media
from tests.helpers.media.hostile import slow_jpeg, slow_video
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
    video_part,
    video_uri,
    wait_for,
)
from tests.server.refusals import check_refusal


@dataclass(frozen=True)
class Slow:
    """A chat with a medium that takes long to decode."""

    body: dict
    limit: str  # the field of the policy
    refusal: tuple[str, str]  # by a limit of half a second
    work: float  # seconds of decoding, more than the start of a process takes

    @property
    def patient(self) -> MediaPolicy:
        return MediaPolicy(**{self.limit: 300})


# The image takes 3 to 15 seconds on two cores. In a process that has run thousands of tests, and where other processes
# compete for the cores, it can be decoded before this process has looked at the time again.
@pytest.fixture(scope="module", params=[pytest.param("image", marks=pytest.mark.slow), "video"])
def slow(request) -> Slow:
    path = f"messages[0].content[1].{request.param}_url.url"
    if request.param == "image":
        words = "image 0: the image took longer than 0.5 s to decode; shrink or re-encode it"
        return Slow(chat("Look", image_part(data_uri(slow_jpeg()))), "image_timeout", (path, words), 0.6)
    words = "video 0: the video took longer than 0.5 s to decode; cut or re-encode it"
    return Slow(chat("Look", video_part(video_uri(slow_video()))), "video_timeout", (path, words), 1.5)


@pytest.mark.spawns
def test_what_takes_longer_than_the_time_limit_is_refused_by_name(engine, slow):
    others = {*psutil.Process().children()}
    app = make_app(engine, media=MediaPolicy(**{slow.limit: 0.5}))
    check_refusal(app, CHAT, slow.body, *slow.refusal)
    assert not decoding(others, slow.work)  # its process was ended


@pytest.mark.spawns
def test_a_deadline_ends_decoding(engine, slow):
    app = make_app(engine, media=slow.patient, request_timeout=1)
    assert call(app, "POST", CHAT, json=slow.body).status_code == 504
    wait_for(lambda: is_idle(engine) and not engine._preparation._num_preparing.total())


@pytest.mark.parametrize("part", [image_part(data_uri()), video_part("http://slow/")], ids=["image", "video"])
def test_a_deadline_ends_fetching(engine, monkeypatch, part):
    cancelled = []

    async def never(*_):
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(True)

    monkeypatch.setattr(media, "fetch", never)
    answer = call(make_app(engine, request_timeout=0.05), "POST", CHAT, json=chat(part))
    assert answer.status_code == 504 and "after 0.05 seconds" in error_of(answer)["message"] and cancelled


@pytest.mark.slow
def test_clients_that_hang_up_do_not_delay_others(make_engine, slow):
    # The server shuts the engine down.
    check_that_hang_ups_delay_nobody(make_engine(), slow.body, slow.patient, slow.work)


@pytest.mark.slow
def test_a_server_that_shuts_down_does_not_wait_for_decoding(make_engine, slow):
    engine, others = make_engine(), {*psutil.Process().children()}
    with serving(engine, drain_seconds=0.1, media=slow.patient) as running:
        client = running.connect()
        client.sendall(post(CHAT, slow.body))
        wait_for(lambda: decoding(others, slow.work), 60)
        decoding(others, slow.work)[0].suspend()
        start = time.monotonic()
    assert time.monotonic() - start < 15
    client.close()
