"""What clients leave behind that ask and do not read the results."""

import json
import time

import pytest

pytest.importorskip("gradio")

from mmvllm.demo import session as session_module
from mmvllm.demo.handlers import MAX_UNREAD_UPDATES
from mmvllm.demo.images import UploadedImage
from tests.helpers.images import encode
from tests.helpers.pages import CONTROLS, event, in_steps, post, until
from tests.helpers.requests import noise_image

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")


def test_updates_of_an_answer_that_nobody_reads_are_few(chatty_site):
    """Each has the whole conversation: gigabytes of answers of a minute."""
    body = {"data": [{"text": "talk", "files": []}, *CONTROLS], "session_hash": "unread-answer"}
    index, queue = chatty_site.events["box", "submit"], chatty_site.page._queue
    with in_steps(chatty_site.engine) as release:
        assert post(f"{chatty_site.url}gradio_api/queue/join", json=body | {"fn_index": index}).is_success
        until(lambda: chatty_site.page.num_unread_updates("unread-answer") > 0)
        for _ in range(15):
            release(1)
            time.sleep(0.1)
        assert chatty_site.page.num_unread_updates("unread-answer") <= MAX_UNREAD_UPDATES + 2
    until(lambda: not queue.event_ids_to_events)
    assert 3 <= chatty_site.page.num_unread_updates("unread-answer") <= MAX_UNREAD_UPDATES + 4


@pytest.mark.spawns
def test_files_of_a_client_that_has_gone_are_not_read(site, monkeypatch):
    monkeypatch.setattr(session_module, "LISTEN_SECONDS", 0.2)
    reads, read = [], UploadedImage.read
    monkeypatch.setattr(UploadedImage, "read", lambda path, decode: (reads.append(path), read(path, decode))[1])
    files = [("files", (f"{number}.png", encode(noise_image(60, 60, seed=number)), "image/png")) for number in range(3)]
    paths = json.dumps(post(f"{site.url}gradio_api/upload", files=files).json())
    index = site.events[None, "change"]
    for number in range(4):
        body = {"data": [paths, *CONTROLS], "fn_index": index, "session_hash": f"gone-{number}"}
        assert post(f"{site.url}gradio_api/queue/join", json=body).is_success
    until(lambda: not site.page._queue.event_ids_to_events)
    assert reads == []
    end, _ = event(site, None, "change", [paths, *CONTROLS], "stays")
    assert end["success"] and "picture tokens" in json.dumps(end) and len(reads) == 3
