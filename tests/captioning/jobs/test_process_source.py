"""Several engines, each in a process: the records of one engine, also when processes are killed or the run is."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mmvllm.captioning import JobError, RayOptions, caption_images
from mmvllm.captioning.jobs import process_source
from mmvllm.cli.common import option_name
from mmvllm.cli.main import main
from mmvllm.errors import ArgumentError
from tests.helpers.captioning import poison
from tests.helpers.captioning.command import TINY, all_but_the_last, by_name, many, recorded, records, until
from tests.helpers.engine.requests import noise_image
from tests.helpers.media import tasks
from tests.helpers.processes import spawned
from tests.helpers.serving.drips import Host

ENGINE = {"device": "cpu", "num_kvcache_blocks": 256, "skip_warmup": True}
DIFFERS = dict.fromkeys(("time", "seconds"))  # these differ between runs
TWO = ("--data-parallel-size", "2")


def run(paths, checkpoint, **options):
    return caption_images(paths, model=checkpoint, engine_args=ENGINE, max_tokens=4, **options)


@pytest.fixture
def engines() -> Callable[[], list[psutil.Process]]:
    """The processes that this one has started since the test began."""
    before = spawned()
    return lambda: [process for process in spawned() if process not in before]


@pytest.fixture
def mixed(tmp_path) -> list[Path]:
    """Images of which two are equal and one is damaged, and a list with a line that names none."""
    folder = many(tmp_path / "mixed", 20)
    (folder / "copy.png").write_bytes((folder / "003.png").read_bytes())
    (folder / "broken.png").write_bytes(b"nothing")
    (tmp_path / "list.jsonl").write_text('{"image": "mixed/001.png", "prompt": "Count!", "id": 7}\n{"text": "none"}\n')
    return [folder, tmp_path / "list.jsonl"]


@pytest.mark.spawns
def test_two_engines_make_the_records_of_one(mixed, checkpoint, tmp_path, engines):
    one = [record | DIFFERS for record in run(mixed, checkpoint, ordered=True)]
    with run(mixed, checkpoint, ordered=True, data_parallel_size=2, output=tmp_path / "out.jsonl") as two:
        assert len(engines()) == 2
        made = list(two)
    assert [record | DIFFERS for record in made] == one and len(one) == 24
    assert records(tmp_path / "out.jsonl") == made
    p = two.progress
    assert (p.num_captioned, p.num_duplicates, p.num_failed) == (21, 1, 2) and 0 <= p.engine_wait_share <= 1
    assert engines() == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), TWO, ("--worker-processes",)], ids=["one engine", "two", "worker processes"])
def test_the_time_of_an_image_holds_in_each_process(options, checkpoint, tmp_path):
    silent, folder = Host(""), many(tmp_path / "images", 3)
    (tmp_path / "list.txt").write_text("".join(f"{path}\n" for path in (f"{silent.url}/a.png", *folder.iterdir())))
    command = ["caption", tmp_path / "list.txt", "--model", checkpoint, "--output", tmp_path / "out.jsonl", *TINY]
    assert main([*map(str, command), "--image-timeout", "2", *options]) == 3
    silent.close()
    (failed,) = (record for record in records(tmp_path / "out.jsonl") if record["error"] is not None)
    assert failed["path"] == f"{silent.url}/a.png" and failed["error"].startswith("took longer than 2 s to load")


def test_images_of_a_killed_engine_are_captioned_again(start, images, names, out, caption, tmp_path):
    assert caption(images, "--output", tmp_path / "calm.jsonl").code == 0
    run = start(names, "--output", out, *TWO)
    with all_but_the_last(images, names):
        until(lambda: recorded(out) > 20)
        spawned(run.pid)[0].kill()
    done = run.end()
    assert done.code == 0 and "Traceback" not in done.err
    assert done.err.count("has ended and is started again: it was ended by SIGKILL\n") == 1
    assert f"captioned      {len(by_name(out))}\n" in done.err
    captions = {name: record["caption"] for name, record in by_name(tmp_path / "calm.jsonl").items()}
    assert {name: record["caption"] for name, record in by_name(out).items()} == captions and len(captions) == 300


@pytest.mark.slow
def test_images_of_an_engine_that_does_not_answer_are_captioned_again(mixed, checkpoint, engines, caplog):
    args = ENGINE | {"step_timeout": 2}
    with caption_images(mixed, model=checkpoint, engine_args=args, max_tokens=4, data_parallel_size=2) as made:
        engines()[0].suspend()
        assert len([record for record in made if record["error"] is None]) == 22
    assert [record.getMessage() for record in caplog.records if "is started again" in record.getMessage()] == [
        "the process of an engine has ended and is started again: it did not answer for 2 s and was killed"
    ]
    assert engines() == []


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_is_resumed(start, images, names, out):
    run = start(names, "--output", out, *TWO, "--worker-processes", "--workers", "1")
    with all_but_the_last(images, names):
        until(lambda: recorded(out) > 0)
        processes = psutil.Process(run.pid).children(recursive=True)
        assert len(processes) >= 4  # engines, and the processes that prepare their images
        run.send(signal.SIGKILL)
        run.end()
    assert psutil.wait_procs(processes, 30)[1] == []
    assert start(images, "--output", out, *TWO).end().code == 0
    assert len(by_name(out)) == 300


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_what_the_engines_have_begun(number, start, images, names, out):
    run = start(names, "--output", out, *TWO)
    with all_but_the_last(images, names):
        until(lambda: recorded(out) > 0)
        processes = psutil.Process(run.pid).children(recursive=True)
        run.send_all(number)  # as a terminal does
        until(lambda: "stopping" in run.err)
    done = run.end()
    assert done.code == 128 + number and "Traceback" not in done.err
    assert f"captioned      {len(by_name(out))}\n" in done.err and 0 < len(by_name(out)) < 300
    assert psutil.wait_procs(processes, 30)[1] == []


@pytest.mark.slow
def test_the_second_ctrl_c_ends_the_engines_at_once(start, images, out):
    run = start(images, "--output", out, *TWO, "--max-tokens", "900", has_end=True)
    until(lambda: out.with_name("out.jsonl.settings").exists())
    processes = psutil.Process(run.pid).children(recursive=True)
    run.send(signal.SIGINT)
    until(lambda: "interrupt again to stop now" in run.err)
    run.send(signal.SIGINT)
    done = run.end(30)
    assert done.code == 130 and "Traceback" not in done.err and "resource_tracker" not in done.err
    assert psutil.wait_procs(processes, 30)[1] == []


UNHANDLED = """
import sys
from mmvllm.captioning import caption_images

run = caption_images(sys.argv[1], engine_args={"device": "cpu"}, max_tokens=4, data_parallel_size=2)
assert next(run)["caption"]
raise RuntimeError("the caller fails")
"""


@pytest.mark.slow
def test_an_error_of_the_caller_ends_the_engines(images):
    done = subprocess.run([sys.executable, "-c", UNHANDLED, images], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.endswith("RuntimeError: the caller fails\n")


@pytest.mark.slow
def test_an_image_that_ends_every_engine_fails_alone(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(process_source, "exchange", poison.exchange_unless_poisonous)
    folder = many(tmp_path / "images", 20)
    noise_image(40, 40, seed=99).save(folder / "004-poison.png")
    with run(folder, checkpoint, data_parallel_size=2) as made:
        errors = {Path(record["path"]).name: record["error"] for record in made}
    reason = "captioning failed, its engine's process died 3 times: it was ended by SIGKILL"
    assert len(errors) == 21 and {name: error for name, error in errors.items() if error} == {"004-poison.png": reason}


@pytest.mark.slow
def test_engines_that_never_begin_end_the_run(folder, checkpoint, monkeypatch, engines):
    monkeypatch.setattr(process_source, "start_engine", tasks.crash_on)
    monkeypatch.setattr(process_source, "MAX_DEATHS", 2)
    with pytest.raises(JobError, match="has died 2 times without a caption in between, now: it was ended by SIGSEGV"):
        run(folder, checkpoint, data_parallel_size=2)
    assert engines() == []


@pytest.mark.spawns
def test_a_wrong_model_is_refused_before_the_output_is_touched(folder, tmp_path, engines):
    with pytest.raises(ValueError, match="no/model/here"):
        run(folder, "no/model/here", data_parallel_size=2, output=tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists() and engines() == []


def test_auto_is_one_engine_in_this_process_on_a_cpu(folder, checkpoint, engines):
    with run(folder, checkpoint, data_parallel_size="auto") as made:
        assert engines() == [] and len(list(made)) == 4


def test_several_engines_cannot_be_combined_with_one_that_is_given(folder, make_llm, checkpoint):
    with pytest.raises(ArgumentError) as refused:
        caption_images(folder, llm=make_llm(checkpoint), data_parallel_size=2)
    assert refused.value.format(option_name) == "--llm is one engine; give --model instead for --data-parallel-size"
    with pytest.raises(ArgumentError, match="is for one machine without Ray"):
        run(folder, checkpoint, data_parallel_size=2, ray=RayOptions())
    with pytest.raises(ValueError, match="data_parallel_size must be an integer of at least 1, got 0"):
        run(folder, checkpoint, data_parallel_size=0)


def test_the_size_is_for_engines_without_ray(folder, capsys):
    assert main(["caption", str(folder), "--executor", "ray", *TWO]) == 2
    assert "--data-parallel-size is for --executor local; with Ray give --actors" in capsys.readouterr().err


def test_a_size_is_a_number_or_auto(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["caption", str(folder), "--data-parallel-size", "all"])
    assert ended.value.code == 2
    assert "'all' is not a whole number of at least 1, nor auto" in capsys.readouterr().err
