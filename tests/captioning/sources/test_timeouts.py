"""A file that takes too long to load fails alone, whatever it waits for."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmvllm import LLM
from mmvllm.captioning import caption_images
from mmvllm.captioning.outputs.report import write_report
from mmvllm.captioning.sources import loading
from mmvllm.captioning.sources.timeouts import Timeouts, outside
from mmvllm.cli.main import main
from mmvllm.errors import ArgumentError
from mmvllm.processors.budget import DecodeBudget
from mmvllm.utils.time_limit import TimeIsOver, TimeLimit
from tests.helpers.captioning.command import many
from tests.helpers.captioning.reports import Page, record
from tests.helpers.media import tasks
from tests.helpers.media.videos import make_clip
from tests.helpers.serving.endpoints import fake_endpoint, said
from tests.helpers.serving.server import ENGINE

TOO_LONG = "took longer than 0.01 s to load; shrink or re-encode it, or raise {}_timeout"


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **ENGINE) as made:
        yield made


@pytest.fixture
def stuck(monkeypatch) -> Iterator[set[str]]:
    """Names of files that no loader returns from."""
    names, release, threads = set(), threading.Event(), []

    def sticking(load):
        def stick(source, *args, **options):
            if Path(source).name in names:
                threads.append(threading.current_thread())
                release.wait()
            return load(source, *args, **options)

        return stick

    monkeypatch.setattr(loading, "load_image", sticking(loading.load_image))
    yield names
    release.set()
    for thread in threads:
        thread.join()


def test_an_image_that_never_ends_fails(llm, stuck, tmp_path):
    stuck.add("000.png")
    (record,) = caption_images(many(tmp_path / "images", 1), llm=llm, image_timeout=0.01)
    assert record["error"] == TOO_LONG.format("image") and record["caption"] is None


@pytest.mark.spawns
@pytest.mark.parametrize("options", [{}, {"clip_seconds": 1}], ids=["frames", "header"])
def test_a_video_that_never_ends_fails(options, llm, monkeypatch, tmp_path):
    make_clip(tmp_path / "a.mp4", 24)
    for task in ("load_clip", "_load_info"):
        monkeypatch.setattr(loading, task, tasks.sleep_on)
    (record,) = caption_images(tmp_path / "a.mp4", llm=llm, video_timeout=0.01, **options)
    assert record["error"] == TOO_LONG.format("video") and record["start"] == 0.0


def test_a_report_waits_no_longer_for_an_image_and_does_not_load_one_that_failed(stuck, tmp_path):
    folder = many(tmp_path / "images", 3)
    stuck.add("000.png")
    records = [record(folder / name) for name in ("000.png", "002.png")]
    records.append(record(folder / "001.png", caption=None, error="took longer", width=None, height=None))
    write_report(tmp_path / "report.html", records, {}, timeouts=Timeouts(image=1.0))
    shown = Page((tmp_path / "report.html").read_text())
    assert [one is not None for one in shown.thumbnails] == [False, True, False]


def test_memory_of_what_takes_too_long_is_free_for_others():
    budget, limit = DecodeBudget(10), TimeLimit(0.01)
    begun, release, left = threading.Event(), threading.Event(), threading.Event()
    limit.check = lambda: None  # it takes the memory, even if its time is over before

    def work():
        with outside(limit, budget.reserve)(10):
            begun.set()
            release.wait()
        left.set()

    with pytest.raises(TimeIsOver):
        limit.run(work)
    begun.wait()
    with budget.reserve(10):
        release.set()
        left.wait()
        assert budget.in_use == 10  # not released twice


@pytest.mark.slow
def test_the_other_images_are_captioned(llm, stuck, tmp_path):
    stuck.update(("001.png", "003.png"))
    folder = many(tmp_path / "images", 6)
    made = caption_images(folder, llm=llm, image_timeout=3, workers=2, max_tokens=4, output=tmp_path / "out.jsonl")
    assert {Path(record["path"]).name for record in made if record["error"] is not None} == stuck
    stuck.clear()
    retried = [*caption_images(folder, llm=llm, max_tokens=4, output=tmp_path / "out.jsonl", retry_failed=True)]
    assert len(retried) == 2 and all(record["caption"] is not None for record in retried)


@pytest.mark.network
def test_an_image_for_an_endpoint_that_never_ends_fails(stuck, tmp_path):
    stuck.add("000.png")
    with fake_endpoint(lambda *_: said("a")) as fake:
        (record,) = caption_images(many(tmp_path / "images", 1), endpoint=fake.url, image_timeout=0.01)
    assert record["error"] == TOO_LONG.format("image") and not fake.bodies


@pytest.mark.parametrize("name", ["image_timeout", "video_timeout"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True])
def test_a_limit_must_be_a_number_of_seconds(name, value, llm, tmp_path, capsys):
    with pytest.raises(
        ArgumentError, match=rf"{name} must be a number of seconds above 0 and below 1,000,000, got {value}"
    ):
        caption_images(many(tmp_path / "images", 1), llm=llm, **{name: value})
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(SystemExit):
        main(["caption", str(tmp_path), option, str(value)])
    assert f"argument {option}: '{value}' is not a number of seconds above 0" in capsys.readouterr().err
