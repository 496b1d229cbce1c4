"""`--accept-truncated`: JPEGs without their last rows are captioned, and their records and the summary say so."""

import json

import pytest

from mmvllm.captioning import caption_images
from mmvllm.cli.caption_output import summarize
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import encode


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    data = encode(noise_image(200, 100), "JPEG")
    for name, content in {
        "cut": data[: len(data) // 2],
        "copy": data[: len(data) // 2],
        "end": data[:-2],
        "whole": data,
    }.items():
        (folder / f"{name}.jpg").write_bytes(content)
    return folder


@pytest.mark.parametrize("worker_processes", [False, pytest.param(True, marks=pytest.mark.spawns)])
def test_records_and_summary_name_images_that_lack_rows(worker_processes, folder, llm, tmp_path):
    options = {"llm": llm, "max_tokens": 2, "output": tmp_path / "o.jsonl", "worker_processes": worker_processes}
    first = caption_images(folder, **options)
    errors = {record["path"].rsplit("/")[-1]: record["error"] for record in first}
    assert {name for name, error in errors.items() if error} == {"cut.jpg", "copy.jpg"}
    assert "truncated" in errors["cut.jpg"] and "truncated" not in summarize(first)

    again = caption_images(folder, retry_failed=True, accept_truncated=True, **options)
    made = list(again)
    assert [(record["error"], record["truncated"], record["width"]) for record in made] == [(None, True, 200)] * 2
    assert sum(record["duplicate_of"] is not None for record in made) == 1
    assert summarize(again)["truncated"] == "2 (the last rows of the image are missing, and gray)"
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    kept = {record["path"].rsplit("/")[-1]: record.get("truncated") for record in lines if record["error"] is None}
    assert kept == {"cut.jpg": True, "copy.jpg": True, "end.jpg": None, "whole.jpg": None}
