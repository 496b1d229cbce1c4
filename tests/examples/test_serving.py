"""The serving examples: the client, and the load test, whose times are not checked."""

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


def test_the_client_prints_the_completion_and_its_usage():
    image = str(EXAMPLES / "images" / "scene-04.png")
    with serving(AsyncLLM(**ENGINE)) as server:
        done = run("openai_client.py", image, "How many stars are there?", OPENAI_BASE_URL=f"{server.url}/v1")
    assert done.returncode == 0, done.stderr
    answer, cost = done.stdout.splitlines()
    assert answer == "One." and cost.endswith(" out)")


def test_under_load_all_completions_are_correct_and_no_resources_leak():
    done = run("benchmarks/serving.py", "--clients", "8", "--seconds", "3", "--cases", "12")
    assert done.returncode in (0, 1), done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["right"] > 0 and summary["wrong"] == 0, done.stdout
    # In such a short run memory grows: buffers and caches are still being allocated.
    assert [leak for leak in summary["leaks"] if not leak.startswith("memory")] == []
