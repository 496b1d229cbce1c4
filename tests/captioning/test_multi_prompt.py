"""Several prompts for an image, and several captions of a prompt."""

import csv
import json
from pathlib import Path

import pytest

from mmvllm import LLM, SamplingParams
from mmvllm.captioning import CaptionSettings, caption_images
from mmvllm.captioning.outputs.record import COLUMNS
from mmvllm.captioning.outputs.report import write_report
from mmvllm.captioning.sources import loading
from mmvllm.errors import ArgumentError
from mmvllm.processors.images.load import load_image
from tests.helpers.captioning.command import records
from tests.helpers.engine.requests import ask, noise_image

PROMPTS = [{"name": "text", "prompt": "Describe this image."}, {"name": "tags", "prompt": "List tags."}, "Count!"]
NAMES = ["text", "tags", "3"]
TEXTS = ["Describe this image.", "List tags.", "Count!"]


@pytest.fixture(scope="module")
def llm(checkpoint):
    made = LLM(checkpoint, device="cpu", dtype="float32", num_kvcache_blocks=256, skip_warmup=True, max_num_seqs=4)
    yield made
    made.exit()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four images; c has the pixels of a in another format, and x is damaged."""
    folder = tmp_path / "images"
    folder.mkdir()
    for i, name in enumerate(("a.png", "b.png")):
        noise_image(140 + i, 164, seed=i).save(folder / name)
    noise_image(140, 164, seed=0).save(folder / "c.bmp")
    (folder / "x.png").write_bytes((folder / "b.png").read_bytes()[:100])
    return folder


def by_name(made) -> dict[str, dict]:
    return {Path(record["path"]).name: record for record in made}


def test_an_image_has_the_caption_of_each_prompt(folder, llm):
    made = by_name(caption_images(folder, llm=llm, max_tokens=4, prompts=PROMPTS))
    assert set(made) == {"a.png", "b.png", "c.bmp", "x.png"}
    for name in ("a.png", "b.png"):
        alone = llm.generate_multimodal([ask(folder / name, text) for text in TEXTS], SamplingParams(max_tokens=4))
        record, captions = made[name], made[name]["captions"]
        assert list(record) == [*COLUMNS, "captions"]
        assert [(one["name"], one["prompt"]) for one in captions] == [*zip(NAMES, TEXTS, strict=True)]
        assert [one["caption"] for one in captions] == [output.text.strip() for output in alone]
        assert record["caption"] == captions[0]["caption"] and record["prompt"] == TEXTS[0]
        assert record["prompt_tokens"] == sum(output.num_prompt_tokens for output in alone)
        assert record["completion_tokens"] == sum(one["completion_tokens"] for one in captions)
        assert record["image_tokens"] == alone[0].num_image_tokens
    assert made["c.bmp"]["captions"] == made["a.png"]["captions"]
    assert bool(made["c.bmp"]["duplicate_of"]) != bool(made["a.png"]["duplicate_of"])  # whichever was read last
    assert made["x.png"]["error"] and made["x.png"]["captions"][0]["caption"] is None


@pytest.mark.parametrize(
    "way", [{}, {"ordered": True}, pytest.param({"worker_processes": True, "workers": 1}, marks=pytest.mark.spawns)]
)
def test_an_image_is_read_and_encoded_once_and_its_prefix_shared(folder, llm, way, monkeypatch):
    outputs, step, num_encoded, reads = [], llm.engine.step, [], []
    monkeypatch.setattr(llm.engine, "on_step", lambda step: num_encoded.append(step.num_images))
    monkeypatch.setattr(loading, "load_image", lambda *args, **keys: reads.append(1) or load_image(*args, **keys))

    def followed():
        finished, number = step()
        outputs.extend(finished)
        return finished, number

    monkeypatch.setattr(llm.engine, "step", followed)
    for i in range(2):
        noise_image(140 + i, 180 + len(way), seed=i).save(folder / f"new-{i}.png")
    made = by_name(caption_images(str(folder / "new-*.png"), llm=llm, max_tokens=4, prompts=PROMPTS, **way))
    assert [record["error"] for record in made.values()] == [None, None]
    assert sum(num_encoded) == 2
    assert len(reads) == (0 if "worker_processes" in way else 2)  # else in these
    cached = [output.num_cached_tokens for output in outputs]
    assert len(cached) == 6 and sum(number == 0 for number in cached) == 2
    block_size = llm.engine.block_size
    for output in outputs:
        num_shared = _end_of_image(output, llm) // block_size * block_size
        assert output.num_cached_tokens in (0, num_shared) and num_shared > 0


def _end_of_image(output, llm) -> int:
    return output.prompt_token_ids.index(llm.engine.media_rules.end_token_id)


def test_one_prompt_that_fails_is_named_and_the_others_are_kept(folder, llm, tmp_path):
    prompts, out = ["Count!", "long " * 3000, "List tags."], tmp_path / "out.jsonl"
    (record,) = caption_images(folder / "a.png", llm=llm, max_tokens=4, prompts=prompts, output=out)
    assert record["error"].startswith("prompt '2': ") and record["caption"] is None
    assert record["finish_reason"] == "error"
    assert [one["caption"] is None for one in record["captions"]] == [False, True, False]
    assert record["captions"][1]["error"] and record["error"].endswith(record["captions"][1]["error"])
    (again,) = caption_images(folder / "a.png", llm=llm, max_tokens=4, prompts=prompts, output=out, retry_failed=True)
    assert again["captions"][0] == record["captions"][0]


def test_an_output_is_resumed_with_the_same_prompts_only(folder, llm, tmp_path):
    out = tmp_path / "out.jsonl"
    job = {"llm": llm, "max_tokens": 4, "output": out}
    assert len([*caption_images(folder, prompts=PROMPTS, limit=2, **job)]) == 2
    assert len([*caption_images(folder, prompts=PROMPTS, **job)]) == 2
    assert [*caption_images(folder, prompts=PROMPTS, **job)] == []
    assert len(records(out)) == 4 and all("captions" in record for record in records(out))
    for changed in (PROMPTS[:2], PROMPTS[:1], [PROMPTS[0], {"name": "other", "prompt": "List tags."}, "Count!"]):
        with pytest.raises(ArgumentError, match="prompts was"):
            caption_images(folder, prompts=changed, **job)


def test_a_line_of_a_list_has_its_own_prompt_alone(folder, llm, tmp_path):
    lines = [{"image": "images/a.png", "prompt": "How many?"}, {"image": "images/b.png"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = by_name(caption_images(tmp_path / "list.jsonl", llm=llm, max_tokens=4, prompts=PROMPTS))
    assert [len(record["captions"]) for record in made.values()] in ([1, 3], [3, 1])
    (one,) = next(record["captions"] for record in made.values() if record["prompt"] == "How many?")
    assert (one["name"], one["prompt"]) == (None, "How many?")


@pytest.mark.parametrize("n", [1, 2])
def test_a_table_has_the_captions_of_own_prompts(n, folder, llm, tmp_path):
    (tmp_path / "list.jsonl").write_text(json.dumps({"image": "images/a.png", "prompt": "How many?"}))
    job = {"llm": llm, "max_tokens": 4, "n": n, "temperature": 1.0, "seed": 5, "output": tmp_path / "out.csv"}
    (record,) = caption_images(tmp_path / "list.jsonl", prompts=PROMPTS, **job)
    with (tmp_path / "out.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    columns = ["caption"] if n == 1 else ["caption_1", "caption_2"]
    assert [row[column] for column in columns] == [one["caption"] for one in record["captions"]]
    assert not any(row[name] for name in row if name.startswith("caption_") and name not in columns)
    assert len(row) == len({*row}) and None not in row
    [*caption_images(folder / "a.png", prompts=PROMPTS, **job | {"output": tmp_path / "other.csv"})]
    assert "caption_1" not in (tmp_path / "other.csv").read_text()


def test_several_captions_of_a_prompt(folder, llm):
    job = {"llm": llm, "max_tokens": 4, "n": 3, "temperature": 1.0, "seed": 5}
    (record,) = caption_images(folder / "a.png", **job)
    (answer,) = llm.generate_multimodal(
        [ask(folder / "a.png", "Describe this image.")], SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=5)
    )
    assert [one["caption"] for one in record["captions"]] == [one.text.strip() for one in answer.completions]
    assert len({one["caption"] for one in record["captions"]}) > 1
    (record,) = caption_images(folder / "a.png", prompts=PROMPTS, **job)
    assert [one["name"] for one in record["captions"]] == [name for name in NAMES for _ in range(3)]


def test_formats(folder, llm, tmp_path):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    job = {"llm": llm, "max_tokens": 4, "prompts": PROMPTS}
    images = [folder / "a.png", folder / "b.png"]
    made = by_name(caption_images(images, output=tmp_path / "out.csv", **job))
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = by_name(csv.DictReader(file))
    assert [rows["a.png"][f"caption_{name}"] for name in NAMES] == [one["caption"] for one in made["a.png"]["captions"]]
    sampled = {"n": 2, "temperature": 1.0, "seed": 1}
    made = by_name(caption_images(images, output=tmp_path / "out.parquet", **job, **sampled))
    rows = by_name(parquet.read_table(tmp_path / "out.parquet").to_pylist())
    names = [f"caption_{name}_{i}" for name in NAMES for i in (1, 2)]
    assert [rows["b.png"][name] for name in names] == [one["caption"] for one in made["b.png"]["captions"]]
    made = by_name(caption_images(images, format="txt", output_dir=tmp_path / "texts", **job))
    lines = (tmp_path / "texts" / "a.txt").read_text().splitlines()
    assert lines == [" ".join(one["caption"].split()) for one in made["a.png"]["captions"]]


def test_the_report_shows_all_captions(tmp_path):
    entries = [{"name": "text", "caption": "a dog"}, {"name": "tags", "caption": "dog, <b>"}]
    record = dict.fromkeys(COLUMNS) | {"path": "a.png", "caption": "a dog", "captions": entries}
    write_report(tmp_path / "report.html", [record], {})
    page = (tmp_path / "report.html").read_text()
    assert "tags: dog, \\u003cb\\u003e" in page


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": []}, "prompts must be a list with one prompt or more"),
        ({"prompts": "Count!"}, "prompts must be a list"),
        ({"prompts": ["a", 3]}, "prompts: number 2 must be text.*, got 3"),
        ({"prompts": ["a", {"name": "x"}]}, "number 2 must be text or .*, got {'name'"),
        (
            {"prompts": ["a", {"name": "", "prompt": "b"}]},
            "the name of number 2 must be text that is not empty, got ''",
        ),
        ({"prompts": ["a", " "]}, "the prompt of number 2 must be text that is not empty, got ' '"),
        ({"prompts": ["a", {"name": "1", "prompt": "b"}]}, "two prompts with the name '1'"),
        ({"prompt": "c", "prompts": ["a", "b"]}, "give either prompt or prompts"),
        ({"n": 3}, "n is 3, but greedy captions would all be equal: give a temperature"),
        ({"n": 0}, "n must be an integer .*, got 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        CaptionSettings(**given)


def test_one_prompt_in_a_list_is_as_it_was_before():
    assert CaptionSettings(prompts=["Count!"]) == CaptionSettings(prompt="Count!")
