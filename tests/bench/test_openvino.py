"""`mmvllm bench --compare openvino`, with stand-ins for OpenVINO's packages. Times are not checked."""

import json
import sys

import pytest

from mmvllm.bench import roofline
from mmvllm.cli.main import main
from tests.helpers.cpu import NEEDS_8_BITS
from tests.helpers.openvino_stub import write_converted, write_stub

SMALL = ("--device", "cpu", "--size", "64x48", "--output-tokens", "5", "--repeat", "1", "--compare", "openvino")

pytestmark = pytest.mark.spawns


@pytest.fixture
def bench(monkeypatch, capsys):
    """Run `mmvllm bench`, with a quick measurement of the machine -> exit code, lines of stdout, stderr."""
    monkeypatch.setitem(roofline.READ_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(roofline.MATRIX_SIZES, "cpu", 256)

    def run(*args: object) -> tuple[int, list[str], str]:
        code = main(["bench", *map(str, args)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """The path of the stand-ins, which is that of the processes started by this one."""
    path = write_stub(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(path))
    return path


@pytest.fixture
def converted(tmp_path):
    return write_converted(tmp_path / "converted")


@pytest.mark.parametrize(
    "quantization",
    [
        pytest.param((), id=""),
        pytest.param(("--quantization", "int8", "--dtype", "bfloat16"), id="int8", marks=NEEDS_8_BITS),
    ],
)
def test_latency_beside_openvino(quantization, bench, stub, converted):
    arguments = ("--batch-sizes", "1,3", "--openvino-model", converted, "--openvino-python", sys.executable)
    code, lines, err = bench("latency", *SMALL, *arguments, *quantization)
    record = json.loads(lines[-1])
    assert code == 0 and record["openvino"] == "1.2.3" and record["arguments"]["openvino_model"] == str(converted)
    assert "round 1: 3 requests, openvino" in err and any(line.startswith("  3 times as fast") for line in lines)
    for batch_size, engines in record["results"].items():
        ours, theirs = engines["mmvllm"], engines["openvino"]
        assert theirs["images"] == theirs["requests"] == int(batch_size)
        assert theirs["output_tokens"] == 5 * int(batch_size)
        assert 0 < theirs["decode_step_seconds"] < theirs["seconds"]
        assert 0 <= theirs["first_token_seconds"]["p50"] <= theirs["request_seconds"]["p50"] <= theirs["seconds"]
        ratio = ours["images_per_second"] / theirs["images_per_second"]
        assert engines["ratio"]["images_per_second"] == pytest.approx(ratio)


def test_throughput_beside_openvino_with_texts(bench, stub, converted):
    arguments = ("--requests", "4", "--text-share", "0.5", "--openvino-model", converted)
    code, lines, _ = bench("throughput", *SMALL, *arguments)
    theirs = json.loads(lines[-1])["results"]["openvino"]
    assert code == 0 and theirs["requests"] == 4 and theirs["output_tokens"] == 20


def test_a_missing_package_is_named(bench, stub, converted):
    (stub / "openvino_genai.py").write_text("raise ImportError('No module named openvino_genai')")
    code, lines, err = bench("latency", *SMALL, "--openvino-model", converted)
    assert code == 2 and not any(line.startswith("{") for line in lines)
    assert f"cannot import OpenVINO GenAI in {sys.executable} (No module named openvino_genai)" in err
    assert "pip install openvino-genai" in err and "--openvino-python" in err


@pytest.mark.parametrize(
    ("marker", "message"),
    [("broken", "OpenVINO GenAI: RuntimeError: cannot read the model"), ("deadly", "ended with code 3")],
)
def test_a_failure_in_the_process_ends_the_run(marker, message, bench, stub, converted):
    (converted / marker).touch()
    code, _, err = bench("latency", *SMALL, "--openvino-model", converted)
    assert code == 2 and message in err


def test_a_model_of_other_sizes_is_refused(bench, stub, tmp_path):
    folder = write_converted(tmp_path / "other", intermediate_size=64)
    code, _, err = bench("latency", *SMALL, "--openvino-model", folder)
    assert code == 2 and "is another model: its intermediate_size is 64, but the compared model has" in err


def test_wrong_options_end_with_a_message(bench, converted, tmp_path):
    code, _, err = bench("latency", *SMALL)
    assert code == 2 and "--compare openvino needs --openvino-model, a folder that `optimum-cli export" in err
    code, _, err = bench("latency", *SMALL, "--openvino-model", tmp_path)
    assert code == 2 and "has no openvino_language_model.xml; give a folder that `optimum-cli export" in err
    code, _, err = bench("latency", "--openvino-model", converted)
    assert code == 2 and "--openvino-model needs --compare openvino" in err
    code, _, err = bench("latency", *SMALL, "--openvino-model", converted, "--openvino-python", tmp_path / "python")
    assert code == 2 and "No such file" in err
