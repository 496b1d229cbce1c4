"""The serving examples: the client, and the load test, whose times are not checked."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mmvllm.entrypoints.async_llm import AsyncLLM
from tests.helpers.media.videos import make_clip
from tests.helpers.models.generation import bundled_with
from tests.helpers.serving.server import ENGINE, serving

pytestmark = pytest.mark.spawns

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, EXAMPLES / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)


@pytest.mark.network
def test_the_client_prints_the_completion_and_its_usage():
    image = str(EXAMPLES / "images" / "scene-04.png")
    with serving(AsyncLLM(**ENGINE)) as server:
        done = run("openai_client.py", image, "How many stars are there?", OPENAI_BASE_URL=f"{server.url}/v1")
    assert done.returncode == 0, done.stderr
    answer, cost = done.stdout.splitlines()
    assert answer == "One." and cost.endswith(" out)")


@pytest.mark.network
def test_the_client_sends_videos_as_videos(tmp_path):
    clip = str(make_clip(tmp_path / "a.mp4"))
    with serving(AsyncLLM(**ENGINE)) as server:
        done = run("openai_client.py", clip, "What happens?", OPENAI_BASE_URL=f"{server.url}/v1")
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"\((\d+) tokens in", done.stdout)[1]) > 100  # most of them of the video


@pytest.mark.network
def test_a_function_is_called_and_its_result_sent_back(tmp_path):
    model = bundled_with(tmp_path / "checkpoint", {"eos_token_id": 461})  # without the bundled limit of 48 tokens
    arguments = ["What is 17 times 23?", "--image", str(EXAMPLES / "images" / "scene-04.png")]
    with serving(AsyncLLM(model, **ENGINE)) as server:
        url = {"OPENAI_BASE_URL": f"{server.url}/v1"}
        free = run("tool_calls.py", *arguments, **url)
        required = run("tool_calls.py", *arguments, "--tool-choice", "required", **url)
    assert free.returncode == required.returncode == 0, free.stderr + required.stderr
    call, *answer = required.stdout.splitlines()
    assert re.fullmatch(r'(add|multiply)\({"a": \d{1,3}, "b": \d{1,3}}\) = \d+', call)
    assert answer and free.stdout.strip() and "(" not in free.stdout


@pytest.mark.network
def test_without_a_server_the_client_says_so():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"  # closed at once
    done = run("openai_client.py", str(EXAMPLES / "images" / "scene-04.png"), "How many?", OPENAI_BASE_URL=url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"no server answers at {url}/") and len(done.stderr.splitlines()) == 1


@pytest.mark.network
def test_a_refused_request_is_one_sentence():
    with serving(AsyncLLM(**ENGINE), api_keys=("secret",)) as server:
        image = str(EXAMPLES / "images" / "scene-04.png")
        done = run("openai_client.py", image, "How many?", OPENAI_BASE_URL=f"{server.url}/v1", OPENAI_API_KEY="wrong")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("the server refused the request: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("script", "package"),
    [("openai_client.py", "openai"), ("memory.py", "psutil"), ("benchmarks/serving.py", "openai")],
)
def test_a_missing_package_is_one_sentence(script, package):
    code = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    environment = os.environ | {"PYTHONPATH": f"{EXAMPLES}{os.pathsep}{EXAMPLES.parent}"}
    command = [sys.executable, "-c", code, EXAMPLES / script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert f"needs the {package} package: pip install" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--data-parallel-size", "2", "--kill", "1"), marks=pytest.mark.slow)],
    ids=["one engine", "two engines, one killed"],
)
def test_under_load_all_completions_are_correct_and_no_resources_leak(options):
    done = run("benchmarks/serving.py", "--clients", "8", "--seconds", "3", "--cases", "12", *options)
    assert done.returncode in (0, 1), done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["right"] > 0 and summary["wrong"] == 0, done.stdout
    assert (summary["kills"] > 0) == bool(options)
    # In such a short run memory grows: buffers and caches are still being allocated.
    assert [leak for leak in summary["leaks"] if not leak.startswith("memory")] == []
