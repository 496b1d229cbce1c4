"""The examples of serving, run as they are: the client's, and the load script, of whose times nothing is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

from mmvllm.async_llm import AsyncLLM
from tests.helpers.server import ENGINE, serving

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, EXAMPLES / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)


def test_openais_client_is_told_the_truth():
    picture = str(EXAMPLES / "images" / "scene-04.png")
    with serving(AsyncLLM(**ENGINE)) as server:
        done = run("openai_client.py", picture, "How many stars are there?", OPENAI_BASE_URL=f"{server.url}/v1")
    assert done.returncode == 0, done.stderr
    answer, cost = done.stdout.splitlines()
    assert answer == "One." and cost.endswith(" out)")


def test_under_load_every_answer_is_right_and_nothing_is_left_behind():
    done = run("benchmarks/serving.py", "--clients", "8", "--seconds", "3", "--cases", "12")
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["right"] > 0 and told["wrong"] == 0, done.stdout
    # In so short a time memory grows: what is first needed is kept.
    assert [leak for leak in told["leaks"] if not leak.startswith("memory")] == []
