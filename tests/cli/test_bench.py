"""`mmvllm bench`: every benchmark runs, counts correctly and ends with its JSON line. Times are not checked."""

import json
import re
import subprocess
import sys
from importlib.machinery import PathFinder

import pytest

import mmvllm
from mmvllm.bench import kernels, preprocess_video, report, roofline, runs
from mmvllm.cli.main import main
from mmvllm.models.folder import BUNDLED
from mmvllm.models.registry import load_config
from tests.helpers.media.videos import make_clip

SMALL = ("--device", "cpu", "--size", "64x48", "--output-tokens", "5", "--repeat", "2")
commit_of_the_checkout = report._commit


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch):
    """Measure a CPU with little work; the values are not checked. On a GPU that would measure its launches."""
    monkeypatch.setitem(roofline.READ_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(roofline.MATRIX_SIZES, "cpu", 256)
    monkeypatch.setattr(kernels, "CPU_SECONDS", 0.0)
    monkeypatch.setattr(report, "_commit", lambda: None)  # which would start a process


@pytest.fixture
def bench(capsys):
    """Run `mmvllm bench` -> exit code, lines of stdout, stderr."""

    def run(*args: object) -> tuple[int, list[str], str]:
        code = main(["bench", *map(str, args)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


def last(lines: list[str], gpu: bool = False) -> dict:
    """The JSON line, after checking what every benchmark reports."""
    record = json.loads(lines[-1])
    assert record["versions"]["mmvllm"] == mmvllm.__version__
    assert {"python", "torch", "transformers", "triton"} <= record["versions"].keys()
    assert record["hardware"]["cores"] >= 1 and record["hardware"]["cpu"]
    assert (record["hardware"]["gpu"] is not None) == gpu
    assert "commit" in record
    return record


def assert_sane(shares: dict, *names: str) -> None:
    assert all(0 < shares[name] < 10 for name in names), shares


@pytest.mark.spawns
def test_the_commit_of_the_checkout_is_recorded(bench, monkeypatch):
    monkeypatch.setattr(report, "_commit", commit_of_the_checkout)
    _, lines, _ = bench("preprocess", "--sizes", "64x48", "--formats", "jpeg", "--images", "1", "--workers", "1")
    assert re.fullmatch("[0-9a-f]{40}(-dirty)?", json.loads(lines[-1])["commit"])


def test_throughput(bench):
    code, lines, err = bench("throughput", *SMALL, "--requests", "6", "--concurrency", "4")
    record = last(lines)
    ours = record["results"]["mmvllm"]
    assert code == 0 and "round 2: 6 requests, mmvllm" in err
    assert record["benchmark"] == "throughput" and record["arguments"]["max_num_seqs"] == 4
    assert (ours["requests"], ours["images"], ours["output_tokens"]) == (6, 6, 6 * 5)
    assert ours["prefix_cache_hit_rate"] == ours["encoder_cache_hit_rate"] == 0
    assert sum(ours["phase_seconds"].values()) == pytest.approx(ours["seconds"], rel=0.5)
    assert all(list(ours[name]) == ["p50", "p90", "p99"] for name in ("first_token_seconds", "request_seconds"))
    assert record["dtype"] == "torch.float32" and record["attention"] == "torch"
    assert len(record["repeats"]) == 2 and ours["peak_memory_bytes"] > 1 << 20
    shares = ("decode_of_bandwidth", "prefill_of_arithmetic", "vision_of_arithmetic", "share_of_limit")
    assert_sane(ours["roofline"], *shares)
    config = load_config(BUNDLED)
    assert record["model"]["hidden_size"] == config.hidden_size and record["model"]["parameters"]["decoder"] > 1e6


@pytest.mark.slow
def test_throughput_without_images_or_with_a_few(bench):
    few = last(bench("throughput", *SMALL, "--requests", "4", "--text-share", "0.5", "--size", "mixed")[1])
    assert few["results"]["mmvllm"]["images"] == 2
    none = last(bench("throughput", *SMALL, "--requests", "4", "--text-share", "1", "--prompt-tokens", "50")[1])
    assert none["results"]["mmvllm"]["images"] == 0
    assert none["results"]["mmvllm"]["input_tokens"] >= 4 * 50
    assert none["results"]["mmvllm"]["roofline"]["vision_of_arithmetic"] is None


def test_one_request_is_counted_in_the_singular(bench):
    _, lines, err = bench("throughput", *SMALL, "--requests", "1", "--text-share", "1")
    assert "round 1: 1 request, mmvllm" in err and any(line.startswith("1 request, ") for line in lines)


@pytest.mark.slow
def test_throughput_compared_with_transformers(bench):
    code, lines, err = bench(
        "throughput", *SMALL, "--requests", "3", "--compare", "transformers", "--load-format", "dummy"
    )
    results = last(lines)["results"]
    assert code == 0 and [line.split(":")[0] for line in err.splitlines() if "transformers" in line][-1] == "round 2"
    counted = ("requests", "images", "input_tokens", "output_tokens")
    assert [results["mmvllm"][name] for name in counted] == [results["transformers"][name] for name in counted]
    ratio = results["mmvllm"]["requests_per_second"] / results["transformers"]["requests_per_second"]
    assert results["ratio"]["requests_per_second"] == pytest.approx(ratio)


@pytest.mark.slow
def test_latency(bench):
    code, lines, _ = bench("latency", *SMALL, "--batch-sizes", "1,3", "--compare", "transformers")
    results = last(lines)["results"]
    assert code == 0 and list(results) == ["1", "3"]
    for batch_size, engines in results.items():
        for name in ("mmvllm", "transformers"):
            assert engines[name]["output_tokens"] == 5 * int(batch_size)
            assert engines[name]["decode_step_seconds"] > 0
            assert engines[name]["first_token_seconds"]["p50"] <= engines[name]["seconds"]
        assert_sane(engines["mmvllm"]["roofline"], "decode_of_bandwidth", "prefill_of_arithmetic", "share_of_limit")


def test_one_output_token_needs_no_decode(bench):
    results = last(bench("latency", *SMALL, "--batch-sizes", "2", "--output-tokens", "1")[1])["results"]
    assert results["2"]["mmvllm"]["decode_step_seconds"] is None
    assert results["2"]["mmvllm"]["seconds_per_output_token"]["p50"] is None


def test_preprocess(bench):
    code, lines, _ = bench(
        *("preprocess", "--sizes", "64x48,90x200", "--formats", "jpeg,PNG,webp", "--images", "3"),
        *("--workers", "3", "--repeat", "1", "--compare", "transformers"),
    )
    results = last(lines)["results"]
    assert code == 0 and len(results) == 2 * 3 * 3
    assert {case["workers"] for case in results} == {1, 2, 3}
    assert {case["format"] for case in results} == {"jpeg", "png", "webp"}
    assert all(case["images_per_second"].keys() == {"mmvllm", "transformers"} for case in results)


@pytest.mark.spawns
def test_preprocess_in_processes(bench):
    code, lines, _ = bench(
        *("preprocess", "--sizes", "64x48", "--formats", "jpeg", "--images", "2", "--workers", "1"),
        *("--processes", "2", "--repeat", "1", "--compare", "transformers"),
    )
    results = last(lines)["results"]
    assert code == 0
    assert [(case["kind"], case["workers"]) for case in results] == [("thread", 1), ("process", 1), ("process", 2)]
    assert [{*case["cpu_seconds_per_image"]} for case in results] == [{"mmvllm", "transformers"}, *[{"mmvllm"}] * 2]
    assert any("64x48 jpeg, 2 processes" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("has_opencv", [True, False])
def test_preprocess_of_a_video(has_opencv, bench, tmp_path, monkeypatch):
    if has_opencv:
        pytest.importorskip("cv2")
    else:
        monkeypatch.setitem(sys.modules, "cv2", None)
    path = make_clip(tmp_path / "a.mp4", 40, fps=8)
    code, lines, _ = bench("preprocess", "--video", path, "--video-fps", "2,0.5", "--repeat", "1")
    record = last(lines)
    readers = {"mmvllm", "PyAV", *(["OpenCV"] if has_opencv else [])}
    assert code == 0 and [case["frames"] for case in record["results"]] == [10, 4]
    assert all(case["seconds_per_frame"].keys() == readers for case in record["results"])
    assert 0 <= record["engine"]["waiting_for_preparation"] < 1
    assert any("OpenCV is not installed" in line for line in lines) != has_opencv


@pytest.mark.slow
def test_a_video_is_generated(bench, monkeypatch):
    monkeypatch.setattr(preprocess_video, "SECONDS", 1)
    monkeypatch.setattr(preprocess_video, "SIZE", (160, 90))
    code, lines, _ = bench("preprocess", "--video", "--video-fps", "4", "--repeat", "1")
    assert code == 0 and lines[0].startswith("a generated clip, 30 frames of 160x90")
    assert last(lines)["arguments"]["video"] is True


def test_kernels(bench):
    code, lines, _ = bench("kernels", "--device", "cpu", "--dtype", "float32", "rms_norm", "silu_mul")
    results = last(lines)["results"]
    names = {"rms_norm", "add_rms_norm", "add_rms_norm_fp8", "silu_mul", "silu_mul_fp8"}
    assert code == 0 and {case["kernel"] for case in results} == names
    assert all(case["torch_seconds"] > 0 and case["triton_seconds"] is None for case in results)
    assert lines[-2] == "kernels need CUDA: only their torch references were timed"


@pytest.mark.slow
def test_every_kernel_has_valid_cases(bench):
    code, lines, _ = bench("kernels", "--device", "cpu")
    assert code == 0
    assert {"rotary", "rotary_write_kv", "write_kv", "splice"} <= {case["kernel"] for case in last(lines)["results"]}


def test_the_line_is_appended_to_a_file(bench, tmp_path):
    arguments = ("kernels", "--device", "cpu", "splice", "--output", tmp_path / "lines.jsonl")
    lines = [bench(*arguments)[1][-1] for _ in range(2)]
    assert (tmp_path / "lines.jsonl").read_text().splitlines() == lines


@pytest.mark.slow
def test_plot(bench, tmp_path):
    path = tmp_path / "steps.png"
    assert bench("throughput", *SMALL, "--requests", "4", "--plot", path)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_plot_without_matplotlib_is_refused_at_once(bench, monkeypatch, tmp_path):
    find_spec = PathFinder.find_spec
    monkeypatch.setattr(
        PathFinder, "find_spec", lambda name, *args: None if name == "matplotlib" else find_spec(name, *args)
    )
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    code, lines, err = bench("throughput", "--plot", tmp_path / "steps.png")
    assert (code, lines) == (2, []) and "pip install 'mmvllm[bench]'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--size", "large"], "'large' is not an image size; give width and height in pixels"),
        (["throughput", "--model", "/no/such/model"], "model '/no/such/model' is neither a local folder nor a hub id"),
        (["throughput", "--output", "/no/such/folder/x"], "there is no folder /no/such/folder; make it first"),
        (["throughput", "--plot", "/no/such/folder/x"], "there is no folder /no/such/folder; make it first"),
        (["throughput", "--size", "64x48", "--prompt-tokens", "1990", "--requests", "1"], "leaves room for"),
        (["latency", "--prompt-tokens", "3000"], "leaves room for 0 up to the model's 2048"),
        (["preprocess", "--images", "2", "--workers", "3"], "--images is 2, fewer than the 3 threads; raise it"),
        (
            ["preprocess", "--images", "2", "--workers", "1", "--processes", "3"],
            "--images is 2, fewer than the 3 processes; raise it",
        ),
        (["preprocess", "--video", "/no/such.mp4"], "/no/such.mp4: no such file"),
        (["preprocess", "--formats", "jpeg,tga"], "--formats has 'tga'; known: jpeg, png, webp"),
        (["kernels", "matmul"], "there is no kernel 'matmul'; known: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_values_end_with_a_message(arguments, message, bench):
    code, lines, err = bench(*arguments)
    assert code == 2 and not any(line.startswith("{") for line in lines)
    assert "mmvllm bench: " in err and message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: BENCHMARK"),
        (["speed"], "there is no benchmark 'speed'"),
        (["throughput", "--load-format", "gguf"], "invalid choice: 'gguf'"),
        (["throughput", "--requests", "0"], "'0' is not a whole number of at least 1"),
        (["throughput", "--text-share", "1.5"], "'1.5' is not a share between 0 and 1"),
        (["preprocess", "--video-fps", "2,0"], "'2,0' is not a list of numbers above 0 and at most 1000"),
        (["preprocess", "--video-fps", "a"], "invalid rates value: 'a'"),
        (["latency", "--batch-sizes", "1,two"], "'two' is not a whole number of at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_usage_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", *arguments])
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_an_interrupt_ends_the_run(bench, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs.Mmvllm, "run", interrupted)
    code, lines, _ = bench("throughput", *SMALL)
    assert code == 130 and not any(line.startswith("{") for line in lines)


def test_a_gpu_is_measured_with_enough_work_to_be_timed():
    """Reads of 100 us and products of 1 ms, on a GPU of 10 TB/s and 1 Pflop/s, take far longer than their launches."""
    assert roofline.READ_BYTES["cuda"] / 10e12 >= 100e-6
    assert 2 * roofline.MATRIX_SIZES["cuda"] ** 3 / 1e15 >= 1e-3


@pytest.mark.gpu
def test_on_a_gpu(bench):
    small = ("--size", "64x48", "--output-tokens", "5", "--repeat", "1", "--device", "cuda")
    record = last(bench("throughput", *small, "--requests", "6", "--compare", "transformers")[1], gpu=True)
    assert record["results"]["mmvllm"]["output_tokens"] == record["results"]["transformers"]["output_tokens"] == 30
    assert record["results"]["mmvllm"]["peak_memory_bytes"] > 1 << 20
    cases = last(bench("kernels", "--device", "cuda")[1], gpu=True)["results"]
    assert all(case["triton_seconds"] > 0 and 0 < case["share_of_bandwidth"] < 2 for case in cases)


@pytest.mark.spawns
def test_help_does_not_load_torch():
    code = "import sys; sys.modules['torch'] = None\nfrom mmvllm.cli.main import main\nmain(['bench', '{}', '--help'])"
    for name in ("throughput", "latency", "preprocess", "kernels", "host"):
        done = subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True)
        assert done.returncode == 0 and "JSON" in done.stdout, done.stderr
