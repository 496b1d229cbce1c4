"""README, docs and the other documents: their code runs, their commands parse, their tables and links are right."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmvllm.captioning.outputs.options import FORMATS
from mmvllm.captioning.outputs.record import COLUMNS
from mmvllm.captioning.presets import PRESETS
from mmvllm.server.chat.protocol import ChatRequest
from mmvllm.server.completions.protocol import CompletionRequest
from mmvllm.server.responses.protocol import ResponsesRequest
from mmvllm.server.run import SEND_SECONDS
from tests.helpers.documents import DOCUMENTS, ROOT, Block, blocks_of, check_command, commands_of, prose_of
from tests.helpers.option_tables import with_tables

BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path)]
SERVER = "http://127.0.0.1:8000"

LONG = ("docs/captioning.md", "docs/performance.md")  # each takes half a minute


def document(path: Path) -> Any:
    """A parameter of a test that runs a document."""
    name = str(path.relative_to(ROOT))
    return pytest.param(path, id=name, marks=[pytest.mark.slow] if name in LONG else [])


by_name = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server with the bundled model."""
    import asyncio

    from mmvllm.entrypoints.async_llm import AsyncLLM
    from tests.helpers.serving.server import ENGINE, serving

    engine = AsyncLLM(**ENGINE)
    with serving(engine) as running:
        yield running.url
    asyncio.run(engine.shutdown(drain=False))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder of a document's blocks, with `examples/` and an `mmvllm` that is this checkout."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("*.pyc"))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in {"mmvllm": "-m mmvllm", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a small model is slower on more threads, where others use them too
    return tmp_path


@pytest.mark.docs
@pytest.mark.parametrize("path", [document(path) for path in DOCUMENTS])
def test_blocks_run(path, folder, monkeypatch, request):
    names = {"__name__": "__main__"}
    for block in blocks_of(path):
        if block.language in ("python", "bash") and "parse" not in block.options:
            text = block.text
            if "server" in block.options:
                text = text.replace(SERVER, url := request.getfixturevalue("url"))
                monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
            (run_python if block.language == "python" else run_bash)(block, text, names)


def run_python(block: Block, text: str, names: dict) -> None:
    # The empty lines make line numbers in tracebacks match the document.
    exec(compile("\n" * (block.line - 1) + text, str(block.path), "exec"), names)


def run_bash(block: Block, text: str, _: dict) -> None:
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{block.name}:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "indented" or "parse" in b.options], ids=lambda block: block.name
)
def test_commands_that_are_not_run_here_parse(block):
    commands = [*commands_of(block.text)]
    assert commands
    for words in commands:
        check_command(words)


def test_every_block_is_run_or_says_why_not():
    for block in BLOCKS:
        languages = ("python", "bash", "json", "yaml", "text", "indented")
        assert block.language in languages, f"{block.name}: {block.language!r}"
        assert block.options.keys() <= {"server", "parse"}, block.name
        assert block.options.get("parse") != "", f"{block.name}: say why it is not run"
        if block.language == "json":
            json.loads(block.text)


@pytest.mark.network
def test_the_kubernetes_deployment_fits_the_server(url):
    import httpx

    (block,) = (block for block in BLOCKS if block.language == "yaml")
    deployment, service = yaml.safe_load_all(block.text)
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    check_command(container["command"] + container["args"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert httpx.get(url + container[probe]["httpGet"]["path"]).status_code == 200
    assert httpx.get(url + pod["metadata"]["annotations"]["prometheus.io/path"]).status_code == 200
    sleep, drain = container["lifecycle"]["preStop"]["exec"]["command"][1], container["args"][-1]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= int(sleep) + int(drain) + 2 * SEND_SECONDS
    assert service["spec"]["selector"] == pod["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"]


def test_the_indented_commands_are_those_that_ci_runs():
    """`.ci/run` reads them from the README and runs each of them."""
    commands = re.findall('^find_in_readme "(.*)"$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("    pip ")]
    assert len(commands) == len(lines) == 5
    for command in commands:
        assert sum(line.endswith(f" && {command}") for line in lines) == 1, command


@pytest.mark.parametrize(  # the table of scaling.md needs models of full size
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.name == "scaling.md" else path for path in DOCUMENTS],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_tables_of_options_are_those_of_the_code(path):
    text = path.read_text()
    assert text == with_tables(text), "run python -m tests.helpers.option_tables"


@by_name
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((.*?)\)", prose_of(path)):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            linked = path.parent / name if name else path
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def anchors(path: Path) -> list[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", prose_of(path), re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@by_name
def test_files_that_are_named_exist(path):
    for name in re.findall(r"`([\w./-]+/[\w./-]*)`", prose_of(path)):
        if re.match(r"(mmvllm|processors|kernels|examples|tests|docs|\.ci)/", name) and not re.search(
            "NAME|FAMILY", name
        ):
            assert (ROOT / name).exists(), name


def test_the_tree_has_all_rooms_in_the_order_of_imports():
    tree = next(block.text for block in blocks_of(ROOT / "docs" / "architecture.md") if "mmvllm/\n" in block.text)
    named = re.findall(r"^  (\w+)/ ", tree, re.M)
    rooms = {path.parent.name for path in (ROOT / "mmvllm").glob("*/__init__.py")} | {"processors", "kernels"}
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [layer.split(" | ") for layer in contract["layers"]]
    assert len(layers) <= 20
    assert sorted(named) == sorted(rooms)
    assert named == sorted(named, key=lambda name: next(i for i, layer in enumerate(layers) if name in layer))


def test_the_reading_list_has_files_and_their_lines():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\S+\.py)` \| (\d+) \| \S", text, re.M)
    assert len(rows) > 20
    for name, number in rows:
        assert (ROOT / name).read_bytes().count(b"\n") == pytest.approx(int(number), rel=0.1), name


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 200
    assert [line for line in lines if len(line) > 120] == []


def test_lines_are_counted():
    rows = re.findall(r"^\| (.*`.*) \| ([\d,]+) \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) == 8
    for names, number in rows:
        globs = [f"{name}**/*.py" if name.endswith("/") else name for name in re.findall(r"`(\S+/\S*)`", names)]
        lines = sum(path.read_bytes().count(b"\n") for glob in globs for path in ROOT.glob(glob))
        assert lines == pytest.approx(int(number.replace(",", "")), rel=0.1), names


@by_name
def test_an_image_is_called_image(path):
    text = re.sub(r"~/Pictures", "", path.read_text())
    assert path.name == "CHANGELOG.md" or "picture" not in text.lower()


def test_formats_presets_and_records_are_documented():
    text = (ROOT / "docs" / "captioning.md").read_text()
    assert [name for name in (*FORMATS, *PRESETS, *COLUMNS) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_fields_of_requests_are_documented(model):
    text = (ROOT / "docs" / "http_api.md").read_text()
    assert [name for name in model.model_fields if f"`{name}`" not in text] == []


@pytest.mark.network
def test_routes_and_metrics_are_documented(url):
    import httpx

    routes, measured = ((ROOT / "docs" / name).read_text() for name in ("serving.md", "observability.md"))
    assert [path for path in httpx.get(f"{url}/openapi.json").json()["paths"] if path not in routes] == []
    metrics = re.findall(r"^# TYPE (\w+?)(?:_total|_created)? ", httpx.get(f"{url}/metrics").text, re.M)
    assert metrics and [name for name in metrics if f"`{name}`" not in measured] == []
