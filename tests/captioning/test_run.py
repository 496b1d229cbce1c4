"""`caption_images` in one process with one tiny engine."""

import base64
import json
import threading
from pathlib import Path

import pytest
import torch

from mmvllm import LLM, SamplingParams
from mmvllm.captioning import CaptionSettings, JobError, caption_images
from mmvllm.captioning.jobs import captioner
from mmvllm.captioning.outputs.record import COLUMNS
from mmvllm.entrypoints.request_queue import Prefetcher
from mmvllm.errors import ArgumentError
from tests.helpers.cpu import NEEDS_8_BITS
from tests.helpers.engine.requests import ask, noise_image


@pytest.fixture(scope="module")
def llm(checkpoint):
    made = LLM(checkpoint, device="cpu", dtype="float32", num_kvcache_blocks=256, skip_warmup=True, max_num_seqs=4)
    yield made
    made.exit()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Six images; c has the pixels of a in another format, and x is damaged."""
    folder = tmp_path / "images"
    folder.mkdir()
    for i, name in enumerate(("a.png", "b.png", "d.png", "e.png")):
        noise_image(60 + i, 64, seed=i).save(folder / name)
    noise_image(60, 64, seed=0).save(folder / "c.bmp")
    (folder / "x.png").write_bytes((folder / "b.png").read_bytes()[:100])
    return folder


def by_name(records) -> dict[str, dict]:
    made = {Path(record["path"]).name: record for record in records}
    return made


def lines(path: Path) -> list[dict]:
    with path.open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def run(folder, llm, **options):
    return caption_images(folder, llm=llm, max_tokens=4, **options)


def test_every_image_has_a_record_with_the_caption_of_the_library(folder, llm):
    job = run(folder, llm, prompt="Count!")
    made = by_name(job)
    assert list(made) != [] and set(made) == {"a.png", "b.png", "c.bmp", "d.png", "e.png", "x.png"}
    assert all(list(record) == list(COLUMNS) for record in made.values())
    (answer,) = llm.generate_multimodal([ask(folder / "d.png", "Count!")], SamplingParams(max_tokens=4))
    assert made["d.png"]["caption"] == answer.text.strip()
    assert (made["d.png"]["width"], made["d.png"]["height"]) == (62, 64)
    assert made["d.png"]["prompt_tokens"] == answer.num_prompt_tokens
    assert made["d.png"]["completion_tokens"] == len(answer.token_ids)
    assert made["x.png"]["caption"] is None and "damaged or truncated" in made["x.png"]["error"]
    p = job.progress
    assert (p.num_captioned, p.num_duplicates, p.num_failed, p.num_skipped) == (4, 1, 1, 0)
    assert 0 <= p.engine_wait_share <= 1


@pytest.mark.spawns
@pytest.mark.parametrize("worker_processes", [False, True])
def test_equal_images_are_captioned_once_with_threads_and_processes(worker_processes, folder, llm):
    made = by_name(run(folder, llm, worker_processes=worker_processes, workers=2))
    # The original is the one that was prepared first.
    original, copy = sorted((made["a.png"], made["c.bmp"]), key=lambda record: record["duplicate_of"] is not None)
    assert original["duplicate_of"] is None and copy["duplicate_of"] == original["path"]
    assert copy["caption"] == original["caption"] and copy["digest"] == original["digest"]
    assert made["b.png"]["duplicate_of"] is None and made["b.png"]["digest"] != original["digest"]


def test_equal_images_with_different_prompts_are_not_duplicates(folder, llm, tmp_path):
    names = [folder / "a.png", folder / "a.png", folder / "c.bmp"]
    prompts = ["One?", "Two?", "One?"]
    entries = [{"image": str(n), "prompt": p, "id": i} for i, (n, p) in enumerate(zip(names, prompts, strict=True))]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, entries)))
    made = {record["id"]: record for record in run(tmp_path / "list.jsonl", llm)}
    assert {made["0"]["duplicate_of"], made["2"]["duplicate_of"]} in ({None, str(names[0])}, {None, str(names[2])})
    assert made["1"]["duplicate_of"] is None
    assert [made[id]["prompt"] for id in "012"] == prompts


@pytest.mark.parametrize(("seed", "duplicates"), [(None, 0), (7, 1)])
def test_sampled_captions_are_shared_only_with_a_seed(seed, duplicates, folder, llm):
    job = run(folder, llm, temperature=1.0, seed=seed)
    assert len(list(job)) == 6
    assert job.progress.num_duplicates == duplicates


def test_a_job_resumes(folder, llm, tmp_path):
    out = tmp_path / "out.jsonl"
    with run(folder, llm, output=out) as job:
        first = [next(job) for _ in range(3)]
    assert lines(out) == first
    job = run(folder, llm, output=out)
    rest = list(job)
    assert job.progress.num_skipped == 3 and len(rest) == 3
    assert sorted(record["path"] for record in lines(out)) == sorted(str(path) for path in folder.iterdir())


def test_a_duplicate_is_found_across_runs(folder, llm, tmp_path):
    out = tmp_path / "out.jsonl"
    list(run(folder / "a.png", llm, output=out))
    (copy,) = run(folder / "c.bmp", llm, output=out)
    assert copy["duplicate_of"] == str(folder / "a.png")


def test_stop_finishes_requests_in_flight_and_takes_no_more(folder, llm, tmp_path):
    for i in range(60):
        noise_image(56, 56, seed=100 + i).save(folder / f"more-{i}.png")
    out = tmp_path / "out.jsonl"
    job = run(folder, llm, output=out)
    made = [next(job)]
    job.stop()
    made += list(job)
    assert 1 <= len(made) < 40
    assert lines(out) == made
    assert not llm.engine.scheduler.groups
    assert len(made) + len(list(run(folder, llm, output=out))) == 66


def test_fail_fast_stops_and_retry_failed_takes_only_failures(folder, llm, tmp_path):
    out = tmp_path / "out.jsonl"
    job = run([folder / "x.png", folder], llm, output=out, fail_fast=True)
    assert by_name(job)["x.png"]["error"] and job.progress.num_failed == 1
    list(run(folder, llm, output=out))
    noise_image(80, 70, seed=9).save(folder / "x.png")
    assert list(run(folder, llm, output=out)) == []
    (again,) = run(folder, llm, output=out, retry_failed=True)
    assert again["error"] is None
    assert len(lines(out)) == 6 and by_name(lines(out))["x.png"] == again


def test_a_limit_counts_images_that_are_not_recorded_yet(folder, llm, tmp_path):
    out = tmp_path / "out.jsonl"
    sizes = [len(list(run(folder, llm, output=out, limit=4))) for _ in range(3)]
    assert sizes == [4, 2, 0] and len(lines(out)) == 6


def test_shards_are_disjoint_and_complete(folder, llm):
    parts = [{record["path"] for record in run(folder, llm, shard=(i, 3))} for i in (1, 2, 3)]
    assert sum(map(len, parts)) == 6 and len(set.union(*parts)) == 6


def test_closing_a_job_ends_it_and_unlocks_the_output(folder, llm, tmp_path):
    out = tmp_path / "out.jsonl"
    job = run(folder, llm, output=out)
    next(job)
    with pytest.raises(ValueError, match="another run is writing to it"):
        run(folder, llm, output=out)
    job.close()
    job.close()
    assert not llm.engine.scheduler.groups
    assert len(list(run(folder, llm, output=out))) == 5


def test_an_error_of_the_walk_is_raised_and_the_records_are_kept(folder, llm, tmp_path, monkeypatch):
    from mmvllm.captioning.jobs import pending_tasks

    def broken(*arguments, find=pending_tasks.find_items):
        for number, item in enumerate(find(*arguments)):
            if number == 4:
                raise RuntimeError("the walk broke")
            yield item

    monkeypatch.setattr(pending_tasks, "find_items", broken)
    out = tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError, match="the walk broke"):
        list(run(folder, llm, output=out))
    assert len(lines(out)) == 4


def test_out_of_memory_is_retried_with_smaller_batches_and_no_image_is_lost(folder, llm, monkeypatch):
    def captions() -> dict[str, str | None]:  # long enough that several are in the engine at once
        made = caption_images(folder, llm=llm, max_tokens=80)
        return {name: record["caption"] for name, record in by_name(made).items()}

    calm = captions()
    whole, sizes = llm.engine.model_runner.run, []

    def runs_out(inputs, *args):
        sizes.append(inputs.num_seqs)
        if sizes[-1] > 2:
            raise MemoryError("no room")
        return whole(inputs, *args)

    monkeypatch.setattr(llm.engine.model_runner, "run", runs_out)
    # Each step waits for prepared requests, so that batches are full however slow the preparation is.
    monkeypatch.setattr(Prefetcher, "get", lambda self, wait, get=Prefetcher.get: get(self, wait=True))
    assert captions() == calm
    assert max(sizes) > 2


def test_prefix_suffix_and_trigger_word(folder, llm):
    (plain,) = run(folder / "a.png", llm)
    (dressed,) = run(folder / "a.png", llm, prefix="<", suffix=">", trigger_word="ohwx")
    assert dressed["caption"] == f"<ohwx, {plain['caption']}>"


def test_pixel_bounds_change_the_tokens_of_an_image(folder, llm):
    (small,) = run(folder / "a.png", llm, max_pixels=56 * 56)
    (large,) = run(folder / "a.png", llm, min_pixels=140 * 140)
    assert small["image_tokens"] < large["image_tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer .*, got 0"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"shard": (3, 2)}, "shard must be I/N with 1 <= I <= N, got 3/2"),
        ({"min_pixels": 9, "max_pixels": 4}, "min_pixels is 9, above max_pixels 4"),
        ({"format": "xml"}, "format must be one of jsonl, csv, parquet, txt, webdataset-json, got 'xml'"),
        ({"format": "csv"}, "csv needs output FILE.csv"),
        ({"skip_existing": True}, "skip_existing needs a format with caption files"),
        ({"output": "/no/such/folder/out.jsonl"}, "there is no folder /no/such/folder"),
        ({"prompt": " "}, "the prompt is empty"),
        ({"min_pixels": 10**12}, "min_pixels must be at most.*, got 1000000000000"),
        ({"overwrite": True, "skip_existing": True, "format": "txt"}, "overwrite starts over"),
        ({"retry_failed": True}, "retry_failed concerns existing records; give output too"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused_before_the_run(options, message, folder, llm):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        caption_images(folder, llm=llm, **{"max_tokens": 4} | options)


def test_a_missing_path_is_refused_before_the_run(folder, llm, tmp_path):
    out = tmp_path / "out.jsonl"
    list(run(folder, llm, output=out))
    with pytest.raises(ValueError, match="nosuch: there is no such file or folder"):
        run([folder, tmp_path / "nosuch"], llm, output=out, overwrite=True)
    assert len(lines(out)) == 6


def test_a_run_can_be_iterated_in_any_thread(folder, llm):
    made = []
    thread = threading.Thread(target=lambda: made.extend(run(folder, llm)))
    thread.start()
    thread.join()
    assert len(made) == 6


def test_two_runs_share_one_engine(folder, llm):
    one, two = run(folder, llm, prompt="One?"), run(folder, llm, prompt="Two?")
    made = [next(one), next(two), *one, *two]
    assert len(made) == 12 and sum(record["error"] is not None for record in made) == 2


def test_overwriting_without_images_keeps_the_earlier_output(folder, llm, tmp_path):
    out = tmp_path / "out.jsonl"
    list(run(folder, llm, output=out))
    before = out.read_bytes()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no images"):
        list(run(tmp_path / "empty", llm, output=out, overwrite=True))
    assert out.read_bytes() == before
    assert len(list(run(folder / "a.png", llm, output=out, overwrite=True))) == 1
    assert len(lines(out)) == 1


def test_what_was_loaded_is_not_kept_until_its_caption_is_there(folder, llm, tmp_path, monkeypatch):
    """A data URI may have megabytes, and its duplicates wait as long as the original."""
    seen, record = [], captioner._record
    monkeypatch.setattr(captioner, "_record", lambda *given: seen.append(given[1].task.item.source) or record(*given))
    data = base64.b64encode((folder / "a.png").read_bytes()).decode()
    lines = [json.dumps({"image": f"data:image/png;base64,{data}", "id": str(i)}) for i in range(3)]
    (tmp_path / "list.jsonl").write_text("\n".join([*lines, json.dumps({"image": str(folder / "b.png")})]))
    records = [*caption_images([tmp_path / "list.jsonl"], llm=llm, max_tokens=3)]
    assert seen == [None] * 2 and len(records) == 4
    assert all(one["caption"] and one["width"] for one in records)


def test_a_changed_data_uri_in_the_same_line_is_another_task(folder, llm, tmp_path):
    out, entries = tmp_path / "out.jsonl", tmp_path / "list.jsonl"
    for name in ("a.png", "b.png", "b.png"):
        data = base64.b64encode((folder / name).read_bytes()).decode()
        entries.write_text(json.dumps({"image": f"data:image/png;base64,{data}"}))
        list(run(entries, llm, output=out))
    assert [record["width"] for record in lines(out)] == [60, 61]


def test_an_engine_that_fails_every_time_ends_the_run(folder, llm, tmp_path, monkeypatch):
    for i in range(30):
        noise_image(56, 56, seed=100 + i).save(folder / f"more-{i}.png")

    def fails(*args):
        raise RuntimeError("device lost")

    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model_runner, "run", fails)
        with pytest.raises(JobError, match=r"the engine fails every time, now with: .*device lost"):
            list(run(folder, llm, output=out))
    assert len(lines(out)) < 36
    list(run(folder, llm, output=out, retry_failed=True))
    list(run(folder, llm, output=out))
    assert [name for name, record in by_name(lines(out)).items() if record["error"]] == ["x.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "some/model"}, "give either llm, or model and engine_args"),
        ({"llm": None, "engine_args": {"dtype": "float32"}}, "dtype is one of the job's settings"),
        ({"llm": None, "engine_args": {"quantization": "int8"}}, "quantization is one of the job's settings"),
        ({"engine_args": {"max_num_seqs": 2}}, "give either llm, or model and engine_args"),
        ({"dtype": "float32"}, "dtype cannot be combined with llm"),
        ({"quantization": "int8"}, "quantization cannot be combined with llm"),
    ],
)
def test_conflicting_engine_arguments_are_refused(options, message, folder, llm):
    with pytest.raises(ValueError, match=message):
        caption_images(folder, **{"llm": llm} | options)


def test_a_run_that_is_garbage_collected_unlocks_its_output(folder, llm, tmp_path):
    out = tmp_path / "out.jsonl"
    for record in run(folder, llm, output=out):
        assert record["path"]
        break
    assert not llm.engine.scheduler.groups
    assert len(list(run(folder, llm, output=out))) == 5


def test_stop_drops_requests_that_the_engine_has_not_started(folder, llm):
    for i in range(60):
        noise_image(56, 56, seed=100 + i).save(folder / f"more-{i}.png")
    job = caption_images(folder, llm=llm, max_tokens=40, fail_fast=False)
    made = [next(job)]
    most = len(llm.engine.scheduler.running)
    job.stop()
    made += job
    # In addition to the running ones: three that one step finished, and two that need no engine.
    assert len(made) <= 1 + most + 3 + 2


def test_caption_files_do_not_replace_inputs_or_outputs_of_the_job(folder, llm, tmp_path):
    (folder / "a.txt").write_text(f"{folder / 'a.png'}\n{folder / 'b.png'}\n")
    options = {"format": "txt", "overwrite": True}
    made = by_name(run(folder / "a.txt", llm, output=folder / "b.txt", **options))
    assert all("is read or written by the job itself" in record["error"] for record in made.values())
    assert (folder / "a.txt").read_text().startswith(str(folder)) and len(lines(folder / "b.txt")) == 2


def test_errors_name_python_arguments_and_have_the_path(folder, llm, tmp_path):
    (tmp_path / "out.jsonl").write_text("mine\n")
    with pytest.raises(ArgumentError, match=r"choose another output, or replace the file with overwrite") as raised:
        run(folder, llm, output=tmp_path / "out.jsonl")
    assert raised.value.values["path"] == tmp_path / "out.jsonl"


def test_the_fingerprint_of_settings_is_stable():
    """Outputs are resumed by it, so it must be the same in all versions."""
    assert CaptionSettings().fingerprint == "dc7048f8f8747f56"
    assert CaptionSettings(prompt="Count!", quantization="int8").fingerprint == "5e37129caef9c587"
    sampled = CaptionSettings(temperature=1, seed=0)
    assert sampled.fingerprint == CaptionSettings(temperature=1.0, seed=0).fingerprint
    assert sampled.fingerprint != CaptionSettings(temperature=1.5, seed=0).fingerprint
    kwargs = [CaptionSettings(chat_template_kwargs={"a": [number]}).fingerprint for number in (2, 2.0, 2.5)]
    assert kwargs[0] == kwargs[1] != kwargs[2]


@NEEDS_8_BITS
def test_the_dtype_and_quantization_of_an_engine_are_recorded(folder, llm, checkpoint):
    assert run(folder, llm).settings.dtype == "float32" and run(folder, llm).settings.quantization is None
    options = {"device": "cpu", "num_kvcache_blocks": 64, "skip_warmup": True, "quantization": "int8"}
    for dtype, recorded in ((torch.bfloat16, "bfloat16"), ("auto", "auto")):
        with LLM(checkpoint, dtype=dtype, **options) as own:
            settings = run(folder, own).settings
        assert (settings.dtype, settings.quantization) == (recorded, "int8")


def test_images_in_flight_are_named_when_the_output_cannot_be_written(folder, llm, tmp_path, monkeypatch):
    job = run(folder, llm, output=tmp_path / "out.jsonl")

    def fails(record):
        raise JobError("out.jsonl cannot be written", path="out.jsonl", errno=28)

    monkeypatch.setattr(job.output, "write", fails)
    with pytest.raises(JobError, match=r"cannot be written\. In flight and not recorded: ") as raised:
        next(job)
    assert (raised.value.path, raised.value.errno) == ("out.jsonl", 28)
    assert raised.value.unrecorded and set(raised.value.unrecorded) <= set(map(str, folder.iterdir()))


def test_captions_by_beam_search(folder, llm):
    records = by_name(caption_images(folder / "a.png", llm=llm, beam_width=3, max_tokens=8))
    params = SamplingParams(beam_width=3, max_tokens=8)
    expected = llm.generate_multimodal([ask(folder / "a.png", "Describe this image.")], params)[0]
    assert records["a.png"]["caption"] == expected.text.strip()
    with pytest.raises(ArgumentError, match="beam_width is 5, max_num_seqs is 4; lower it"):
        caption_images(folder, llm=llm, beam_width=5)
    with pytest.raises(ValueError, match=r"temperature is 0\.5, but it cannot be used with beam search"):
        caption_images(folder, llm=llm, beam_width=2, temperature=0.5)
