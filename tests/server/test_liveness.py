"""Whatever a client asks for, and whatever videos others send, probes and images are answered soon."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mmvllm.models.folder import BUNDLED
from tests.helpers.media.hostile import SLOW_EXPRESSION, slow_video, with_samples
from tests.helpers.media.videos import make_clip
from tests.helpers.models.adapters import make_adapter
from tests.helpers.processes import spawned
from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    SCENES,
    chat,
    completion,
    data_uri,
    image_part,
    post,
    receive_until,
    video_part,
    video_uri,
    wait_for,
)

pytestmark = pytest.mark.slow

IDS = [20 + i % 400 for i in range(2000)]
COSTLY = {
    "likely tokens of a prompt": (COMPLETIONS, completion(prompt=[IDS], max_tokens=0, prompt_logprobs=20)),
    "as many as are accepted": (COMPLETIONS, completion(prompt=[IDS] * 3, max_tokens=0, prompt_logprobs=20)),
    "of 16 prompts": (COMPLETIONS, completion(prompt=[IDS] * 16, max_tokens=0, prompt_logprobs=20)),
    "of 64 prompts": (COMPLETIONS, completion(prompt=[IDS] * 64, max_tokens=0, prompt_logprobs=20)),
    "of an echo": (COMPLETIONS, completion(prompt=[IDS[:400]] * 64, max_tokens=0, logprobs=20, echo=True)),
    "of many completions": (
        CHAT,
        chat("Hello", max_tokens=380, ignore_eos=True, temperature=1, n=16, logprobs=True, top_logprobs=20),
    ),
    "embeddings": (EMBEDDINGS, {"model": "bundled", "input": [IDS] * 512}),
    "allowed tokens": (CHAT, chat("Hello", max_tokens=1, allowed_token_ids=[20] * 10**6)),
    "as many allowed tokens as are accepted": (CHAT, chat("Hello", max_tokens=1, allowed_token_ids=[20] * 2**18)),
}


PROBES = """
import http.client, sys, threading, time

is_done, longest, num_probes = threading.Event(), 0.0, 0
threading.Thread(target=lambda: (sys.stdin.read(), is_done.set())).start()
while not is_done.wait(0.02) or not num_probes:
    begin = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    connection.request("GET", "/health/live")
    assert connection.getresponse().status == 200
    longest, num_probes = max(longest, time.monotonic() - begin), num_probes + 1
    if num_probes == 1:
        print("begun", flush=True)
print(longest)
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Start `mmvllm serve` in a separate process, and yield the server's URL."""
    command = [sys.executable, "-m", "mmvllm", "serve", "--device", "cpu", "--port", "0", "--skip-warmup"]
    command += ["--enable-lora", "--allow-lora-updating"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[-1].removesuffix("/v1")
        finally:
            process.terminate()


@contextmanager
def probing(url: str) -> Iterator[list[float]]:
    """Send probes from another process while the `with` runs, and then add the longest response time in seconds."""
    command, longest = [sys.executable, "-c", PROBES, url.rpartition(":")[2]], []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        yield longest
        longest.append(float(process.communicate(timeout=60)[0]))


@pytest.mark.parametrize("what", COSTLY)
def test_probes_are_answered_during_costly_requests(what, url):
    path, body = COSTLY[what]
    sent, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with probing(url) as longest:
        answer = httpx.post(url + path, content=sent, headers=headers, timeout=120)
    assert answer.status_code in (200, 400), answer.text[:300]
    assert longest[0] < 1


def test_probes_are_answered_while_an_adapter_is_matched(url, tmp_path):
    folder = make_adapter(tmp_path / "adapter", BUNDLED, target_modules=["q_proj"])
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": SLOW_EXPRESSION}))
    with probing(url) as longest:
        body = {"lora_name": "slow", "lora_path": str(folder)}
        answer = httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=120)
    assert answer.status_code == 400 and "takes too long" in answer.text, answer.text
    assert longest[0] < 1


def test_grammars_are_compiled_in_a_process_first(url):
    before = {process.pid for process in spawned(recursive=True)}
    answer = httpx.post(url + CHAT, json=chat("Hello", guided_choice=["yes"]), timeout=120)
    assert answer.json()["choices"][0]["message"]["content"] == "yes"
    assert len({process.pid for process in spawned(recursive=True)} - before) == 1


def num_preparing(url: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return sum(one.value for family in families for one in family.samples if one.name.endswith("requests_preparing"))


@pytest.mark.parametrize("kind", ["samples that are none", "frames that take long"])
def test_videos_do_not_delay_an_image(kind, url, tmp_path):
    made = {
        "samples that are none": lambda: with_samples(make_clip(tmp_path / "a.mp4", 24).read_bytes(), 10**6),
        "frames that take long": slow_video,
    }
    body = post(CHAT, chat("Look", video_part(video_uri(made[kind]()))))
    clients = [socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) for _ in range(4)]
    for client in clients:
        client.sendall(body)
    if kind == "frames that take long":
        wait_for(lambda: num_preparing(url) == 4)
    begin = time.monotonic()
    image = chat("Look", image_part(data_uri(SCENES[0])), max_tokens=1)
    answer = httpx.post(url + CHAT, json=image, timeout=120)
    assert answer.status_code == 200 and time.monotonic() - begin < 3
    for client in clients:
        if kind == "samples that are none":
            assert receive_until(client).startswith(b"HTTP/1.1 400")
        client.close()
