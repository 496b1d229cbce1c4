"""The attack on a server: what it sends is refused, and a short run of it finds nothing."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from mmvllm.entrypoints.async_llm import AsyncLLM
from tests.helpers.needs import needs
from tests.helpers.serving.server import ENGINE, serving

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))
import attack
import hostile

SLOW_IMAGES = ("JPEG of 3,000 scans", "GIF of comments")  # which take seconds if they are decoded


@pytest.fixture(scope="module")
@needs("network")
def port():
    with serving(AsyncLLM(**ENGINE), api_keys=(hostile.KEY,)) as running:
        yield running.address[1]


@pytest.mark.spawns
@pytest.mark.parametrize("make", [hostile.http_requests, attack.with_bodies, attack.with_images])
def test_everything_hostile_is_refused(port, make):
    for name, request in make().items():
        if name not in SLOW_IMAGES:
            status, body = asyncio.run(attack.exchange(port, request))
            assert isinstance(status, int) and 400 <= status < 500, (name, status, body)


@pytest.mark.spawns
def test_without_an_attack_there_are_no_problems(port):
    image = attack.IMAGES[0]
    answer = asyncio.run(attack.ask(port, image))
    assert answer and asyncio.run(attack.ask(port, image)) == answer
    counted = asyncio.run(attack.metrics(port))
    assert counted["ready"] == 1 and not any(counted[name] for name in (*attack.IN_FLIGHT, "status 500"))


@pytest.mark.slow
def test_a_short_attack_disturbs_nobody():
    command = [sys.executable, attack.__file__, "--seconds", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
