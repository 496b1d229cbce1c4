"""What importing the package does, from a bare checkout and without the optional packages."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mmvllm
from mmvllm.outputs import CompletionOutput, RequestOutput

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for folder in ("mmvllm", "processors", "kernels") for path in (ROOT / folder).rglob("*.py"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES if path.stem[0] != "_"]
MODULES = [name if name.startswith("mmvllm.") else f"mmvllm.{name}" for name in MODULES]
OF_EXTRAS = ("mmvllm.captioning.ray_", "mmvllm.demo.", "mmvllm.http_fetching", "mmvllm.server.")


def python(*args: str, **env: str) -> str:
    """What a fresh interpreter prints, started in the repository root."""
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_the_engine_config_does_not_load_torch():
    code = "import sys; sys.modules['torch'] = None; import mmvllm; print(mmvllm.EngineConfig().max_num_seqs)"
    assert python("-c", code) == "64\n"


def test_help_names_the_commands():
    text = python("-m", "mmvllm", "--help")
    assert all(name in text for name in ("bench", "caption", "demo", "info", "serve"))


def test_public_names_load_on_first_use():
    assert {"LLM", "LLMEngine", "EngineConfig", "SamplingParams", "RequestOutput"} <= set(mmvllm.__all__)
    assert all(getattr(mmvllm, name) is not None for name in mmvllm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        mmvllm.LMM  # noqa: B018


def test_everything_imports_without_the_optional_packages_beside_transformers():
    """In one fresh interpreter in the checkout, whose top-level folders transformers must not take for packages."""
    code = """
import sys, importlib, importlib.machinery

absent = ("torchvision", "flash_attn", "qwen_vl_utils", "gradio", "fastapi", "uvicorn", "prometheus_client",
          "matplotlib", "ray")
find_spec = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *args: (
    None if name.split(".")[0] in absent else find_spec(name, *args)
)
for name in sys.argv[1:]:
    importlib.import_module(name)
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration
import mmvllm.processors.image
print(mmvllm.processors.image.__file__)
"""
    modules = [name for name in MODULES if not name.startswith(OF_EXTRAS)]
    assert len(modules) > 60
    assert Path(python("-c", code, *modules).strip()) == ROOT / "processors" / "image.py"


@pytest.mark.parametrize("folder", ["kernels", "processors"])
def test_top_level_folders_are_not_packages_of_their_own(folder):
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_unpickles_nothing_runs_no_foreign_code_and_imports_no_top_level_folder(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported}.isdisjoint(("kernels", "processors", "pickle", "dill", "joblib"))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called.isdisjoint(("torch.load", "eval", "exec", "np.load"))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
            assert isinstance(node.value, ast.Constant) and node.value.value is False


def test_an_output_reads_like_its_first_answer_and_like_a_dict():
    answer = CompletionOutput("a cat", [5, 6], "eos", cumulative_logprob=-1.5, logprobs=[{5: -1.0}, {6: -0.5}])
    output = RequestOutput("r", [answer, CompletionOutput("a dog", [7], "length")])
    for name in ("text", "token_ids", "finish_reason", "cumulative_logprob", "logprobs"):
        assert getattr(output, name) == output[name] == getattr(answer, name)
    with pytest.raises(KeyError, match="caption"):
        output["caption"]


def test_an_output_without_answers_reads_as_an_error():
    output = RequestOutput("r", error="no such file")
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "error")
    assert output.logprobs is None and output.cumulative_logprob is None
