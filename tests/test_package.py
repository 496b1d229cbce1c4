"""Rules for the whole package: imports, optional packages, names, words and file sizes."""

import ast
import os
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

import mmvllm

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for folder in ("mmvllm", "processors", "kernels") for path in (ROOT / folder).rglob("*.py"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES if path.stem[0] != "_"]
MODULES = [name if name.startswith("mmvllm.") else f"mmvllm.{name}" for name in MODULES]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OF_EXTRAS = (  # modules that need an optional extra
    "mmvllm.captioning.jobs.endpoint",
    "mmvllm.captioning.jobs.ray_source",
    "mmvllm.captioning.jobs.ray_worker",
    "mmvllm.demo.",
    "mmvllm.media.http_fetching",
    "mmvllm.server.",
)
DOCUMENTS = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [ROOT / "demo_app.py", *sorted((ROOT / "examples").rglob("*.py"))]
# Where the code may say "picture": the visible texts of the demo, and data that must stay as it is.
PICTURES = {
    "examples/scenes.py": '"What is in this picture?"',  # a question of the training data
    "examples/train_demo_model.py": "{% if add_vision_id %}Picture {{ image_count.value }}",  # Qwen2-VL's template
}


def python(*args: str, **env: str) -> str:
    """Output of a new interpreter that is started in the repository root."""
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.spawns
def test_import_and_help_do_not_load_torch():
    assert python("-c", "import mmvllm, sys; print('torch' in sys.modules, mmvllm.__version__)").split() == [
        "False",
        mmvllm.__version__,
    ]
    python(
        "-c",
        "import sys, runpy; sys.argv = ['mmvllm', '--help']; sys.modules['torch'] = None\n"
        "try: runpy.run_module('mmvllm', run_name='__main__')\n"
        "except SystemExit as error: assert not error.code, error",
    )


@pytest.mark.spawns
def test_the_engine_config_does_not_load_torch():
    code = "import sys; sys.modules['torch'] = None; import mmvllm; print(mmvllm.EngineConfig().max_vision_patches)"
    assert python("-c", code) == "16384\n"


@pytest.mark.spawns
def test_help_names_the_commands():
    text = python("-m", "mmvllm", "--help")
    assert all(name in text for name in ("bench", "caption", "demo", "info", "serve"))


def test_public_names_load_on_first_use():
    assert {"LLM", "LLMEngine", "EngineConfig", "SamplingParams", "RequestOutput"} <= set(mmvllm.__all__)
    assert all(getattr(mmvllm, name) is not None for name in mmvllm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        mmvllm.LMM  # noqa: B018


@pytest.mark.spawns
def test_modules_import_without_the_optional_packages_and_with_transformers():
    """In a new process in the checkout, whose top-level folders transformers must not import."""
    code = """
import sys, importlib, importlib.machinery

absent = ("torchvision", "flash_attn", "gradio", "fastapi", "uvicorn", "prometheus_client",
          "matplotlib", "pyarrow", "ray")
find_spec = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *args: (
    None if name.split(".")[0] in absent else find_spec(name, *args)
)
for name in sys.argv[1:]:
    importlib.import_module(name)
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration
import mmvllm.processors.images.processor
print(mmvllm.processors.images.processor.__file__)
"""
    modules = [name for name in MODULES if not name.startswith(OF_EXTRAS)]
    assert len(modules) > 200
    assert Path(python("-c", code, *modules).strip()).resolve() == ROOT / "processors" / "images" / "processor.py"


@pytest.mark.parametrize("folder", ["kernels", "processors"])
def test_top_level_folders_are_not_packages_of_their_own(folder):
    assert not [*(ROOT / folder).rglob("__init__.py")]
    assert (ROOT / "mmvllm" / folder).resolve() == ROOT / folder  # where editors and type checkers find them


def test_no_folder_has_more_files_than_a_reader_takes_in():
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in SOURCES)
    assert {name: count for name, count in counts.items() if count > 22} == {}


def test_a_wheel_has_every_folder():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in SOURCES}
    names = {".".join(folder.parts) for folder in folders}
    assert {*setuptools["packages"]} == {name if name.startswith("mmvllm") else f"mmvllm.{name}" for name in names}


# Messages between a process and the workers that it has started itself.
OWN_PICKLES = (
    "mmvllm/processes/pool.py",
    "mmvllm/processes/worker.py",
    "mmvllm/processes/channel.py",
    "mmvllm/media/decoding.py",
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_unpickles_runs_remote_code_or_imports_what_it_must_not(path):
    tree = parsed(path)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    if path.relative_to(ROOT).as_posix() in OWN_PICKLES:
        imported.remove("pickle")
    assert {name.split(".")[0] for name in imported}.isdisjoint(("kernels", "processors", "pickle", "dill", "joblib"))
    assert {name.split(".")[0] for name in imported}.isdisjoint(("torchvision", "torchcodec", "decord"))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called.isdisjoint(("torch.load", "eval", "exec", "np.load"))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
            assert isinstance(node.value, ast.Constant) and node.value.value is False


def test_class_names_are_unique():
    modules = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


def test_an_image_is_called_image():
    """Only the visible texts of the demo and a few values that must not change say "picture"."""
    found = {}
    for path in (*SOURCES, *SCRIPTS, *DOCUMENTS):
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8").replace(PICTURES.get(name, "\0"), "")
        if not name.startswith("mmvllm/demo/") and "picture" in text.lower():
            found[name] = [line for line in text.splitlines() if "picture" in line.lower()]
    assert found == {}


def test_names_in_the_demo_say_image():
    names = set()
    for path in (ROOT / "mmvllm" / "demo").glob("*.py"):
        for node in ast.walk(parsed(path)):
            names |= {getattr(node, field) for field in ("id", "name", "arg", "attr") if hasattr(node, field)}
    assert {name for name in names if name and "picture" in name.lower()} == set()


def test_test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in TESTS}
    assert {name: length for name, length in lengths.items() if length >= 450} == {}
