"""Fixtures of many tests: random checkpoints, engines that exit after the test, transformers' models, a browser."""

import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, which transformers does too

from mmvllm import LLM
from mmvllm.models.folder import BUNDLED
from mmvllm.models.registry import load_config
from mmvllm.worker import loading
from mmvllm.worker.cuda_graphs import Graphs
from tests.helpers.engine.engines import assert_idle
from tests.helpers.media.video_references import end_process
from tests.helpers.models.checkpoints import make_checkpoint
from tests.helpers.models.reference import Reference
from tests.helpers.needs import mark_by_fixtures, needs, undeclared
from tests.helpers.quarantine import FILE as QUARANTINE
from tests.helpers.quarantine import quarantined, set_aside
from tests.helpers.scheduling import as_scheduled
from tests.helpers.thinning import thin

# The same examples in every run, however slow the machine.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")

# The models are tiny: a second thread would cost more than it computes, above all on a busy machine.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before cases are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_by_fixtures(items)
    thin(items)
    set_aside(items, quarantined(QUARANTINE.read_text()))


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Name a failed test at once: a run that is ended at its limit may have no summary."""
    if report.failed:
        return "failed" if report.when == "call" else "error", f"\nfailed: {report.nodeid}\n", "FAILED"
    return None


def pytest_sessionfinish() -> None:
    end_process()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):  # with the fixtures of its module
    return (yield from undeclared(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    return (yield from undeclared(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item):
    return (yield from undeclared(item))


@pytest.fixture(autouse=True)
def normal_priority():
    """Fail a test that leaves its thread with another scheduling policy, which all later tests would inherit."""
    with as_scheduled() as is_unchanged:
        yield
        unchanged = is_unchanged()
    if not unchanged:
        pytest.fail("the test leaves its thread with another scheduling policy; see as_scheduled", pytrace=False)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Return the folder of the random checkpoint of a named shape, made on first use."""
    made = {}

    def folder(shape: str) -> Path:
        if shape not in made:
            made[shape] = make_checkpoint(tmp_path_factory.mktemp(shape), shape)
        return made[shape]

    return folder


@pytest.fixture(scope="session")
def checkpoint(request, checkpoints) -> Path:
    """The checkpoint of most tests; those that are marked `every_family` run with one of each family."""
    return checkpoints(getattr(request, "param", "gqa2-tied"))


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


@pytest.fixture(scope="module")
def shared_llm(checkpoint):
    llm = LLM(checkpoint, dtype="float32", device="cpu", num_kvcache_blocks=128, max_num_seqs=4, skip_warmup=True)
    yield llm
    llm.exit()


@pytest.fixture
def llm(shared_llm):
    """The module's LLM; after each test no request, block or image is left in it."""
    yield shared_llm
    assert_idle(shared_llm)
    shared_llm.engine.encoder_cache.check(set())


@pytest.fixture(scope="session")
def reference(checkpoints):
    """Return the `Reference` of a named shape, or of the bundled checkpoint for None."""
    made = {}

    def get(shape: str | None) -> Reference:
        if shape not in made:
            made[shape] = Reference(BUNDLED if shape is None else checkpoints(shape))
        return made[shape]

    return get


@pytest.fixture
def make_pair(make_llm, checkpoint):
    """Make two LLMs with the same options: one as it is on a CPU, one that launches steps ahead.

    A GPU launches ahead. On the CPU a launched step is computed at once; the order of operations is the same.
    `encoder_cache_rows` is the size of the encoder cache in rows of the checkpoint, in float32.
    """

    def make(encoder_cache_rows=None, **options):
        if encoder_cache_rows is not None:
            options["encoder_cache_bytes"] = 4 * encoder_cache_rows * load_config(checkpoint).mm_embed_size
        options = {"kvcache_block_size": 4} | options
        return make_llm(checkpoint, **options), make_llm(checkpoint, async_scheduling=True, **options)

    return make


@pytest.fixture
def ahead(make_pair):
    return make_pair()[1]


@pytest.fixture
def replayed(monkeypatch) -> dict[type, list]:
    """Engines compute on the same buffers what a graph would replay; the sizes of these, by class, as they come."""
    sizes = defaultdict(list)

    def capture(graphs: Graphs, compute: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            sizes[type(compute.func.__self__)].append(*compute.args)
            compute()

        compute()
        return replay

    monkeypatch.setattr(Graphs, "capture", capture)
    monkeypatch.setattr(loading, "_uses_graphs", lambda config, device, attention: not config.enforce_eager)
    return sizes


# Not for the session: the driver keeps an event loop running in the main thread.
@pytest.fixture(scope="module")
@needs("browser")
def chromium():
    """A headless Chromium with a fake camera."""
    sync_api = pytest.importorskip("playwright.sync_api")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("chromium is not installed")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    flags += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=flags, headless=True)
        yield browser
        browser.close()
