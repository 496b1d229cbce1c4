"""Wrong options, paths and models end a command with one sentence, and before torch is imported."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from mmvllm.cli.main import main
from mmvllm.models.folder import BUNDLED

ROOT = Path(__file__).resolve().parent.parent.parent
# Importing torch would raise ImportError, which no command expects.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from mmvllm.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder: checkpoints that cannot be served, and an image."""
    shutil.copytree(BUNDLED, tmp_path / "bnb")
    for name in ("qwen3.5", "no-weights", "no-config"):
        (tmp_path / name).mkdir()
    config = json.loads((BUNDLED / "config.json").read_text())
    (tmp_path / "no-weights" / "config.json").write_text(json.dumps(config))
    (tmp_path / "bnb" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bnb"}}))
    unsupported = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    (tmp_path / "qwen3.5" / "config.json").write_text(json.dumps(unsupported))
    shutil.copy(ROOT / "examples" / "images" / "scene-01.png", tmp_path / "x.png")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("caption nosuch", "nosuch: there is no such file or folder"),
        ("caption x.png --prompts deep.json", "--prompts deep.json is not JSON: it is nested too deeply"),
        ("caption x.png --model nosuch", "model 'nosuch' is neither a local folder nor a hub id"),
        ("caption x.png --model no-config", "no-config: not a checkpoint folder, it has no config.json"),
        ("caption x.png --model no-weights", "no-weights has no *.safetensors weights"),
        ("caption x.png --model qwen3.5", "architecture 'Qwen3_5ForConditionalGeneration' is not supported"),
        (
            "caption x.png --model bnb",
            "is quantized with 'bnb', which is not supported; supported: 'awq', 'gptq', 'fp8'",
        ),
        ("serve --model Qwen/Qwen2-VL-2B-Instruct", "is not a local folder and cannot be downloaded from the hub"),
        ("demo --model nosuch", "model 'nosuch' is neither"),
        ("bench latency --model nosuch", "model 'nosuch' is neither"),
        ("info --model nosuch", "model 'nosuch' is neither"),
        ("caption x.png --dtype float33", "dtype must be 'auto', 'float32', 'float16' or 'bfloat16', got 'float33'"),
        ("caption x.png --quantization int5", "invalid choice: 'int5'; did you mean int8?"),
        ("caption x.png --output a.xyz", "--output a.xyz: the suffix is not .jsonl, .csv or .parquet"),
        ("caption x.png --format txt --caption-extension x", "--caption-extension is 'x': give a dot"),
        ("caption x.png --max-tokens 0", "--max-tokens must be an integer of at least 1, -1 or None, got 0"),
        ("caption x.png --min-pixels 9 --max-pixels 1", "min_pixels is 9, above max_pixels 1"),
        ("caption x.png --prompt-file nope", "--prompt-file nope cannot be read"),
        ("caption x.png --overwrite", "--overwrite concerns existing records; give --output too"),
        ("caption x.png --report r.html", "--report shows the records; give --output too"),
        ("caption x.png --actors 2", "--actors needs --executor ray"),
        ("serve --num-replicas 2 --session-affinity", "--num-replicas, --session-affinity needs --executor ray"),
        ("serve --port 99999", "'99999' is not a port from 0 to 65535"),
    ],
)
def test_a_refusal_needs_no_torch(line, message, folder):
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", WITHOUT_TORCH, *line.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"mmvllm {line.split()[0]}") and message in done.stderr
    assert len(done.stderr.splitlines()) <= 2, done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("capton x.png", "mmvllm: there is no command 'capton'; did you mean caption?"),
        ("--verison", "mmvllm: there is no option --verison; did you mean --version?"),
        ("caption x.png --max-tokns 4", "mmvllm caption: there is no option --max-tokns; did you mean --max-tokens?"),
        ("caption x.png --max-tokns=4", "mmvllm caption: there is no option --max-tokns; did you mean --max-tokens?"),
        ("caption --ouput", "mmvllm caption: there is no option --ouput; did you mean --output?"),
        ("caption x.png --xyzzy", "mmvllm caption: there is no option --xyzzy\n"),
        ("bench throughput --plt x", "mmvllm bench throughput: there is no option --plt; did you mean --plot?"),
        ("caption x.png --preset shrt", "argument --preset: invalid choice: 'shrt'; did you mean short?"),
        ("info Qwen/Qwen2-VL-2B-Instruct", "a model is named with --model Qwen/Qwen2-VL-2B-Instruct"),
        ("caption x.png --max-tok 4", "mmvllm caption: there is no option --max-tok; did you mean --max-tokens?"),
        ("serve x --limit-mm-per-prompt image=4", "there is no option --limit-mm-per-prompt; --max-images and --max-v"),
        ("serve x --quantization awq", "invalid choice: 'awq'; a quantized checkpoint says so itself; leave it out"),
        ("serve x --pipeline-parallel-size 2", "invalid choice: '2' (choose from 1)"),
        ("serve x -pp 2", "invalid choice: '2' (choose from 1)"),
        ("serve x --max-model-len 4x", "'4x' is not a number of tokens, such as 4096, 4k"),
        ("serve x --speculative-config {}", "there is no option --speculative-config; there is no speculative"),
        ("serve x --block-size=16", "there is no option --block-size; write --kvcache-block-size"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_right_one(line, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and "usage:" not in err
    assert len(err.splitlines()) == 2 and err.splitlines()[1].endswith(" --help.")


@pytest.mark.parametrize("line", ["caption --prompt=--curious x.png", "caption -- --odd-name.png"])
def test_what_argparse_accepts_is_accepted(line, folder, capsys):
    assert main([*line.split()[:1], "--dtype", "float33", *line.split()[1:]]) == 2
    assert "dtype must be 'auto', 'float32', 'float16' or 'bfloat16', got 'float33'" in capsys.readouterr().err


def test_options_of_vllm_that_change_nothing_are_named_once(capsys):
    line = "--trust-remote-code --tool-call-parser hermes --swap-space=4 -pp 1 --tokenizer-mode auto --lora-modules a=x"
    assert main(["serve", *line.split()]) == 2
    told, refused = capsys.readouterr().err.splitlines()
    options = "--trust-remote-code, --tool-call-parser, --swap-space, -pp, --tokenizer-mode"
    assert told == f"mmvllm serve: options without effect: {options}" and "needs --enable-lora" in refused


def test_options_may_be_written_as_for_vllm():
    parser = argparse.ArgumentParser()
    import_module("mmvllm.cli.serve").add_arguments(parser)
    line = "-tp 2 -dp 3 --dtype half --max-model-len 4k --generation-config vllm"
    args = parser.parse_args(line.split())
    assert (args.tensor_parallel_size, args.data_parallel_size, args.dtype) == (2, 3, "half")
    assert (args.max_model_len, args.generation_config) == (4000, "none")
    for given, want in (("8K", 8192), ("auto", None), ("-1", None), ("512", 512)):
        assert parser.parse_args(["--max-model-len", given]).max_model_len == want
    assert (parser.parse_args([]).tensor_parallel_size or 1, parser.parse_args([]).data_parallel_size) == (1, 1)


def test_a_server_is_given_one_model(capsys):
    assert main(["serve", "one", "--model", "two"]) == 2
    assert "the model is named twice: one and --model two" in capsys.readouterr().err
    assert main(["serve", "--model", "nosuch", "--lora-modules", "a=x", "--lora-modules", "a=y"]) == 2
    assert "--lora-modules needs --enable-lora" in capsys.readouterr().err


def test_options_that_are_given_again_are_kept():
    parser = argparse.ArgumentParser()
    import_module("mmvllm.cli.serve").add_arguments(parser)
    line = "--lora-modules a=x b=y --lora-modules c=z --served-model-name m n --served-model-name o"
    args = parser.parse_args(line.split())
    assert args.lora_modules == ["a=x", "b=y", "c=z"] and args.served_model_name == ["m", "n", "o"]
