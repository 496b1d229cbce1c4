"""Fixtures of many tests: small random checkpoints, engines that exit, transformers as the reference, a browser."""

import os
import shutil
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, which transformers does too

from mmvllm import LLM
from mmvllm.models.weights import BUNDLED
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.reference import Reference

# The models are tiny: a second thread only waits for the first, and badly so on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folder of a random checkpoint by the name of its shape, made on first use."""
    made = {}

    def folder(shape: str) -> Path:
        if shape not in made:
            made[shape] = make_checkpoint(tmp_path_factory.mktemp(shape), shape)
        return made[shape]

    return folder


@pytest.fixture(scope="session")
def checkpoint(checkpoints) -> Path:
    return checkpoints("gqa2-tied")


@pytest.fixture
def make_llm():
    """LLM(...) that exits after the test."""
    made = []

    def make(model, **engine_args) -> LLM:
        engine_args = {
            "dtype": "float32",
            "device": "cpu",
            "num_kvcache_blocks": 256,
            "skip_warmup": True,
        } | engine_args
        made.append(LLM(model, **engine_args))
        return made[-1]

    yield make
    for llm in made:
        llm.exit()


@pytest.fixture(scope="session")
def reference(checkpoints):
    """`Reference` by the name of a shape, or of the bundled checkpoint for None."""
    made = {}

    def get(shape: str | None) -> Reference:
        if shape not in made:
            made[shape] = Reference(BUNDLED if shape is None else checkpoints(shape))
        return made[shape]

    return get


@pytest.fixture(scope="module")  # no longer: its driver keeps an event loop in the thread of the tests
def chromium():
    """Debian's browser without a window, with a camera that films a test card."""
    sync_api = pytest.importorskip("playwright.sync_api")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("there is no chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    flags += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=flags, headless=True)
        yield browser
        browser.close()
