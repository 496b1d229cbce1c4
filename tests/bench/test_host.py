"""`mmvllm bench host`: every case runs and its tokens are counted. Times are not checked."""

import json
import pstats

import pytest

from mmvllm.bench import report
from mmvllm.cli.main import main
from mmvllm.kernels import sampling
from mmvllm.sampling import sampler
from tests.helpers.engine.rank_threads import use_rank_threads

SMALL = ("host", "--device", "cpu", "--steps", "6", "--contexts", "40,5", "--sequences", "1,4")


@pytest.fixture
def bench(monkeypatch, capsys):
    """Run `mmvllm bench` -> exit code, lines of stdout, stderr."""
    monkeypatch.setattr(report, "_commit", lambda: None)  # which would start a process

    def run(*args: object) -> tuple[int, list[str], str]:
        code = main(["bench", *map(str, args)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


@pytest.mark.slow
def test_each_step_gives_every_sequence_a_token(bench):
    code, lines, _ = bench(*SMALL, "--streams", "3")
    record = json.loads(lines[-1])
    assert code == 0 and len(record["steps"]) == 2 * 2 * 3 * 2 and len(record["async"]) == 3
    for step in record["steps"]:
        assert step["tokens"] == 6 * step["sequences"], step
        assert step["microseconds"] > 0
        assert {"schedule", "pack", "copy", "launch", "sample", "commit"} <= step["parts"].keys()
        assert ("add" in step["parts"]) == (step["kind"] == "mixed")
    keys = [(step["sequences"], step["context"], step["sampling"], step["kind"]) for step in record["steps"]]
    assert keys[:2] == [(1, 40, "greedy", "decode"), (1, 40, "greedy", "mixed")] and len(set(keys)) == len(keys)
    assert sum(line.startswith("  4 x 40 top_p ") for line in lines) == 2


def test_all_tokens_of_all_streams_arrive(bench):
    _, lines, _ = bench(*SMALL, "--sampling", "top_p", "--kinds", "mixed", "--streams", "3")
    (streamed,) = json.loads(lines[-1])["async"]
    assert (streamed["sequences"], streamed["context"], streamed["kind"]) == (3, 5, "decode")
    assert streamed["tokens"] % 3 == 0 and streamed["tokens"] >= 3 * 6
    assert streamed["microseconds"] > 0 and {"deliver", "receive"} <= streamed["parts"].keys()


def test_the_samplers_kernels_run_only_if_asked_for(bench, monkeypatch):
    ran, few = [], ("--sampling", "top_p", "--kinds", "decode", "--streams", "0")
    monkeypatch.setattr(sampler, "sample", lambda *args: ran.append(None) or sampling.sample(*args))
    bench(*SMALL, *few)
    assert not ran
    bench(*SMALL, *few, "--arithmetic")
    assert ran


@pytest.mark.network
def test_what_is_exchanged_with_other_ranks_is_measured(bench, monkeypatch):
    use_rank_threads(monkeypatch)
    _, lines, _ = bench(*SMALL, "--sampling", "greedy", "--streams", "3", "--tensor-parallel-size", "2")
    record = json.loads(lines[-1])
    assert all(step["tokens"] == 6 * step["sequences"] for step in record["steps"]) and len(record["steps"]) == 8
    assert all({"send", "append"} <= step["parts"].keys() for step in record["steps"])
    assert record["async"] == []


def test_streams_can_be_left_out(bench):
    _, lines, _ = bench(*SMALL, "--sampling", "greedy", "--kinds", "decode", "--streams", "0", "--vocab-size", "2000")
    record = json.loads(lines[-1])
    assert record["async"] == [] and record["model"]["vocab_size"] == 2000
    assert not any(line.startswith("with AsyncLLM") for line in lines)


def test_a_profile_is_a_table_or_a_file_of_pstats(bench, tmp_path):
    few = ("--sampling", "greedy", "--streams", "0", "--profile")
    assert bench(*SMALL, *few, tmp_path / "table.txt")[0] == bench(*SMALL, *few, tmp_path / "steps.prof")[0] == 0
    assert "llm_engine.py" in (tmp_path / "table.txt").read_text()
    assert pstats.Stats(str(tmp_path / "steps.prof")).total_calls > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampling", "greedy,beam"], "--sampling has 'beam'; known: greedy, top_p, penalties"),
        (["--kinds", "prefill"], "--kinds has 'prefill'; known: decode, mixed"),
        (["--profile", "/no/such/folder/x"], "there is no folder /no/such/folder; make it first"),
    ],
)
def test_wrong_values_end_with_a_message(arguments, message, bench):
    code, lines, err = bench(*SMALL, *arguments)
    assert code == 2 and not lines and message in err
