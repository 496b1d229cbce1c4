"""Boxes and repetitions in records, tables, summary and report."""

import csv
import json

import pytest
from PIL import Image

from mmvllm.captioning import caption_images
from mmvllm.captioning.outputs.report import write_report
from mmvllm.captioning.presets import DEFAULT_PROMPT, PRESETS
from mmvllm.cli.caption_output import summarize
from tests.helpers.captioning.command import many, records
from tests.helpers.engine.scripted import script

ANSWER = "<|object_ref_start|>a <b>kite</b><|object_ref_end|><|box_start|>(100,200),(500,750)<|box_end|>"
ANSWER += "<|box_start|>(500,500)<|box_end|>"


def expected(width: int, height: int) -> list[dict]:
    box = {"box": [round(side, 2) for side in (width * 0.1, height * 0.2, width * 0.5, height * 0.75)]}
    point = {"point": [width / 2, height / 2]}
    return [{"label": "a <b>kite</b>", "image": 0, **each} for each in (box, point)]


@pytest.fixture
def run(llm, monkeypatch, tmp_path):
    """Caption three images and a duplicate, whose answers are ANSWER, into an output of this name."""
    script(monkeypatch, llm.tokenizer, ANSWER)
    folder = many(tmp_path / "images", 3)
    Image.open(folder / "001.png").save(folder / "copy.png")

    def run(name: str, **options):
        options = {"prompt": PRESETS["boxes"], "max_tokens": 200, "output": tmp_path / name} | options
        with caption_images([folder], llm=llm, **options) as job:
            return job, list(job)

    return run


def test_records_have_boxes_in_pixels_of_the_image(run, tmp_path):
    _, made = run("out.jsonl")
    assert len(made) == 4 and made == records(tmp_path / "out.jsonl")
    for record in made:
        assert record["boxes"] == expected(record["width"], record["height"])
        assert record["caption"] == "a <b>kite</b>(100,200),(500,750)(500,500)"
    assert sum(record["duplicate_of"] is not None for record in made) == 1


def test_each_of_several_captions_has_its_boxes(run):
    job, made = run("out.jsonl", prompt=DEFAULT_PROMPT, prompts=["One.", "Two."])
    for record in made:
        boxes = expected(record["width"], record["height"])
        assert record["boxes"] == boxes and [one["boxes"] for one in record["captions"]] == [boxes, boxes]
    assert summarize(job)["captioned"] == "3"


def test_tables_have_them_as_json(run, tmp_path):
    _, made = run("out.csv")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        assert [json.loads(row["boxes"]) for row in csv.DictReader(file)] == [record["boxes"] for record in made]
    parquet = pytest.importorskip("pyarrow.parquet")
    run("out.parquet")
    cells = parquet.read_table(tmp_path / "out.parquet")["boxes"].to_pylist()
    assert sorted(cells) == sorted(json.dumps(record["boxes"]) for record in made)


def test_the_report_has_places_in_per_cent(run, tmp_path):
    _, made = run("out.jsonl")
    broken = [[], 3, {"box": 1}, {"box": [1, 2, 3]}, {"point": [1, "2"]}, {"box": [1, 2, 3, float("inf")]}]
    made.append(made[0] | {"boxes": [broken, *broken]})
    write_report(tmp_path / "report.html", made, {})
    page = (tmp_path / "report.html").read_text()
    assert page.count('"boxes":') == 4  # of the card with the broken ones it has none
    assert '[10.0,20.0,40.0,55.0,"a \\u003cb\\u003ekite' in page and "[50.0,50.0,0.0,0.0," in page
    assert "<b>kite" not in page


@pytest.mark.slow
def test_captions_that_repeat_themselves_are_ended_and_counted(run, llm, monkeypatch):
    script(monkeypatch, llm.tokenizer, "a star and " * 150)
    job, made = run("out.jsonl")
    assert {record["finish_reason"] for record in made} == {"repetition"}
    assert all(64 <= record["completion_tokens"] < 100 for record in made)
    assert summarize(job)["repetitions"] == "3 (the caption was ended where it repeated itself)"
    job, made = run("all.jsonl", stop_on_repetition=False)
    assert {record["finish_reason"] for record in made} == {"length"} and "repetitions" not in summarize(job)


@pytest.mark.browser
def test_the_report_draws_them_over_the_image(run, tmp_path, chromium):
    _, made = run("out.jsonl")
    write_report(tmp_path / "report.html", made, {})
    page = chromium.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    image, box = page.locator(".drawn img").first.bounding_box(), page.locator(".drawn .box").first.bounding_box()
    assert page.locator(".drawn").count() == 4 and page.locator(".drawn .point").count() == 4
    assert page.locator(".drawn .label").first.inner_text() == "a <b>kite</b>"
    assert box["x"] == pytest.approx(image["x"] + 0.1 * image["width"], abs=2)
    assert box["y"] == pytest.approx(image["y"] + 0.2 * image["height"], abs=2)
    assert box["width"] == pytest.approx(0.4 * image["width"], abs=2)
    assert box["height"] == pytest.approx(0.55 * image["height"], abs=2)
    page.close()
