"""The report shows what the records contain, in one page without other files."""

import base64
import hashlib
import json
import os
import tarfile
import urllib.parse
import urllib.request
import weakref
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmvllm.captioning.outputs import report
from mmvllm.captioning.outputs.report import write_report
from tests.helpers.captioning.reports import HOSTILE, Page, page, pixels, record
from tests.helpers.engine.requests import noise_image


def test_the_page_shows_the_records(tmp_path, colors):
    records = [
        record(colors[0], id="7"),
        record("gone.png", caption=None, error="no such file", width=None, height=None, seconds=None),
        record(colors[1], duplicate_of=str(colors[0])),
    ]
    shown = page(tmp_path / "report.html", records, {"Model": "a model", "Rate": "9 a second"}, title="My captions")
    for got, want in zip(shown.records, records, strict=True):
        for key in ("path", "id", "caption", "error", "duplicate_of", "width", "prompt_tokens", "seconds", "time"):
            assert got.get(key) == want[key]
    assert shown.all("title") == ["My captions"] and shown.all("h1") == ["My captions"]
    assert (shown.all("th"), shown.all("td")) == (["Model", "Rate"], ["a model", "9 a second"])
    assert "3 images: 2 captioned, 1 failed; 1 duplicate." in "".join(shown.all("p"))


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_records_are_never_markup(text, tmp_path):
    harmless = page(tmp_path / "harmless.html", [record("a", caption=None, error="e")], {"label": "text"}, title="t")
    path = tmp_path / "report.html"
    keys = dict.fromkeys(("caption", "error", "duplicate_of", "id", "finish_reason", "model", "prompt"), text)
    shown = page(path, [record(text, **keys)], {text: text}, title=text)

    def outline(of: Page) -> list:
        return [(tag, {k: v for k, v in attributes.items() if k != "content"}) for tag, attributes, _ in of.elements]

    assert outline(shown) == outline(harmless) and shown.comments == []
    displayed = text.encode("utf-8", "backslashreplace").decode()
    assert {shown.records[0][key] for key in ("path", "caption", "error", "duplicate_of", "id")} == {displayed}
    assert shown.all("title") == [displayed]
    scripts = [line for line in path.read_bytes().split(b"\n") if line.startswith(b"<script type")]
    assert not any(mark.encode() in line[1:-9] for line in scripts for mark in "<&\u2028\u2029")


def test_the_page_has_the_records_as_they_are_in_the_output(tmp_path):
    records = [record("a.png", seconds=0.0), record(os.fsdecode(b"\xff.png"), caption="dög"), {"path": "b", "n": 1e999}]
    shown = page(tmp_path / "report.html", records)
    assert shown.lines[0] == json.dumps(records[0]) and shown.lines[1].startswith('{"path": "\\udcff.png"')
    assert [json.loads(line) for line in shown.lines] == records


def test_a_page_with_some_records_says_what_a_download_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_IMAGES", 5)
    says = "A download has only the records that are shown."
    for number, want in ((5, False), (6, True)):
        shown = page(tmp_path / "report.html", [record("gone.png") for _ in range(number)])
        assert (says in "".join(shown.all("p"))) == want and len(shown.lines) == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, "12", [1], {}])
def test_values_that_are_not_finite_numbers_are_left_out(value, tmp_path):
    shown = page(tmp_path / "report.html", [record("a", width=value, seconds=value, time=value)])
    assert {"width", "seconds", "time"}.isdisjoint(shown.records[0])


def test_keys_may_be_missing(tmp_path):
    shown = page(tmp_path / "report.html", [{}, {"path": "a.png"}, {"path": None, "caption": ["no", "text"]}])
    assert [r["path"] for r in shown.records] == ["", "a.png", ""]
    assert shown.thumbnails == [None] * 3


def test_a_page_without_records_says_so(tmp_path):
    shown = page(tmp_path / "report.html", [])
    assert shown.records == [] and "0 images" in "".join(shown.all("p")) and not shown.all("svg")


def test_the_policy_allows_only_the_scripts_and_styles_of_the_page(tmp_path):
    shown = page(tmp_path / "report.html", [record("a")])
    (policy,) = [a["content"] for tag, a, _ in shown.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
    for tag in ("style", "script"):
        (text,) = [text for text in shown.all(tag) if not text.startswith("[")]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    addresses = [a[key] for _, a, _ in shown.elements for key in ("src", "href", "action") if key in a]
    assert addresses == ["data:,"]


# Images


def test_every_record_has_its_own_thumbnail(tmp_path, colors):
    shown = page(tmp_path / "report.html", map(record, colors * 20))
    assert len(shown.thumbnails) == 240
    for i, thumbnail in enumerate(shown.thumbnails):
        level = 20 * (i % 12)
        assert np.abs(pixels(thumbnail).mean((0, 1)) - (level, 0, 255 - level)).max() < 8


@pytest.mark.parametrize("size, want", [((1600, 1200), (160, 120)), ((300, 900), (53, 160)), ((30, 20), (30, 20))])
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_thumbnails_are_small(size, want, suffix, tmp_path):
    noise_image(*size).save(tmp_path / f"a.{suffix}")
    (thumbnail,) = page(tmp_path / "report.html", [record(tmp_path / f"a.{suffix}")]).thumbnails
    assert pixels(thumbnail).shape == (*want[::-1], 3)
    assert len(thumbnail) < 8000


def test_thumbnails_are_upright(tmp_path):
    image = Image.new("RGB", (400, 300), "red")
    image.paste("blue", (0, 0, 200, 300))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise: the left edge becomes the top
    image.save(tmp_path / "a.jpg", exif=exif)
    (thumbnail,) = page(tmp_path / "report.html", [record(tmp_path / "a.jpg")]).thumbnails
    shown = pixels(thumbnail)
    assert shown.shape == (160, 120, 3)
    assert shown[20, 60, 2] > 200 > 60 > shown[140, 60, 2]


def test_images_that_cannot_be_read_have_no_thumbnail(tmp_path, colors):
    (tmp_path / "text.png").write_text("Dear Sir or Madam")
    (tmp_path / "empty.png").touch()
    (tmp_path / "half.png").write_bytes(colors[0].read_bytes()[:60])
    os.mkfifo(tmp_path / "pipe.png")
    names = ["text.png", "empty.png", "half.png", "pipe.png", "missing.png", "a" * 5000, "", "nul\0", "list.jsonl:12"]
    shown = page(tmp_path / "report.html", [record(tmp_path / name) for name in names] + [record(colors[3])])
    assert shown.thumbnails[:-1] == [None] * len(names) and shown.thumbnails[-1]


def test_odd_names_have_thumbnails_and_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [
        "~a.png",
        "data:a.png",
        "a b#c?d%20.png",
        "javascript:1.png",
        os.fsdecode(b"caf\xe9.png"),
        "-.png",
        "x.tar/a.png",
    ]
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        noise_image(20, 20).save(name, "PNG")
    shown = page(tmp_path / "report.html", map(record, names))
    assert all(shown.thumbnails)
    for name, card in zip(names, shown.records, strict=True):
        assert card["link"].startswith("./")
        assert os.fsdecode(urllib.parse.unquote_to_bytes(card["link"])) == f"./{name}"
        assert not set(card["link"]) & set(":?#")


def test_links_are_relative_only_below_the_page(tmp_path, colors):
    (tmp_path / "pages").mkdir()
    near, far, gone = (
        page(folder / "report.html", [record(path)]).records[0].get("link")
        for folder, path in (
            (tmp_path, colors[0]),
            (tmp_path / "pages", colors[0]),
            (tmp_path, tmp_path / "gone.png"),
        )
    )
    assert (near, far, gone) == ("./0.png", colors[0].as_uri(), None)


def test_images_on_the_web_are_linked_and_not_fetched(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **keys: fetched.append(args))
    urls = ["http://example.com/a.png", "HTTPS://example.com/b.tar/c.png"]
    shown = page(tmp_path / "report.html", map(record, urls))
    assert [card["link"] for card in shown.records] == urls
    assert (fetched, shown.thumbnails) == ([], [None, None])


def test_images_in_tars_have_thumbnails(tmp_path, colors):
    for name in ("one.tar", "two.tar"):
        with tarfile.open(tmp_path / name, "w") as tar:
            for path in colors:
                tar.add(path, f"in/{path.name}")
    (tmp_path / "two.tar").write_bytes((tmp_path / "two.tar").read_bytes()[: 4 * 1024 + 512])
    shown = page(
        tmp_path / "report.html",
        [record(f"{tmp_path}/{tar}.tar/in/{i}.png") for tar in ("one", "two", "no") for i in (1, 11)],
    )
    assert [thumbnail is not None for thumbnail in shown.thumbnails] == [True, True, True, False, False, False]
    assert pixels(shown.thumbnails[1])[0, 0, 0] > 200 > 60 > pixels(shown.thumbnails[2])[0, 0, 0]
    assert not any("link" in card for card in shown.records)


def test_duplicates_share_the_thumbnail_of_their_original(tmp_path, colors):
    first, second, third = colors[:3]
    records = [
        record(first),
        record(second, duplicate_of=str(first)),
        record(third, duplicate_of="not/in/this/report.png"),
    ]
    shown = page(tmp_path / "report.html", records)
    assert [card.get("same") for card in shown.records] == [None, 0, None]
    assert [thumbnail is not None for thumbnail in shown.thumbnails] == [True, False, True]


# Limits


@pytest.mark.slow
def test_records_are_not_kept_in_memory(tmp_path):
    class Record(dict):
        __hash__ = object.__hash__

    alive, most = weakref.WeakSet(), 0

    def records():
        nonlocal most
        for i in range(20_000):
            alive.add(one := Record(record(f"gone/{i}.png", caption=f"{i} " * 20)))
            most = max(most, len(alive))
            yield one
            del one

    shown = page(tmp_path / "report.html", records())
    assert most <= 4
    assert len(shown.records) == len(shown.thumbnails) == 10_000
    assert "The first 10,000 of 20,000 captioned images are shown." in "".join(shown.all("p"))


def test_the_page_is_written_while_the_records_are_read(tmp_path):
    sizes = []

    def records():
        for i in range(1000):
            yield record("gone.png", caption=f"{i} " * 1000)
            sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))

    write_report(tmp_path / "report.html", records(), {})
    written = (tmp_path / "report.html").stat().st_size
    assert sizes[500] > 0.3 * written


def test_captioned_and_failed_images_have_separate_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_IMAGES", 5)
    monkeypatch.setattr(report, "MAX_FAILURES", 3)
    bad = [record(f"bad{i}", caption=None, error="bad") for i in range(10)]
    good = [record(f"good{i}") for i in range(20)]
    for records in (bad + good, good + bad, bad[:3] + good[:5]):
        shown = page(tmp_path / "report.html", records)
        names = sorted(card["path"] for card in shown.records)
        assert names == ["bad0", "bad1", "bad2", "good0", "good1", "good2", "good3", "good4"]
        text = "".join(shown.all("p"))
        assert ("The first 5 of 20 captioned images are shown." in text) == (len(records) > 8)
        assert ("The first 3 of 10 failures are shown." in text) == (len(records) > 8)


def test_records_of_many_characters_are_counted_and_not_shown(tmp_path, monkeypatch):
    """A hundred of them at a time would take gigabytes."""
    monkeypatch.setattr(report, "MAX_CHARACTERS", 2000)
    texts = [record("a", caption="x" * 3000), record("b"), record("c", caption=None, error="y" * 3000)]
    shown = page(tmp_path / "report.html", texts)
    assert [card["path"] for card in shown.records] == ["b"]
    text = "".join(shown.all("p"))
    assert (
        "3 images: 2 captioned, 1 failed" in text and "2 records of more than 2,000 characters are not shown." in text
    )
    assert "A download has only the records that are shown." in text


def test_an_error_leaves_the_earlier_page_complete(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, [], {}, "an earlier report")
    earlier = path.read_text()

    def records():
        yield from (record("gone.png") for _ in range(500))
        raise OSError("the list broke off")

    with pytest.raises(OSError, match="the list broke off"):
        write_report(path, records(), {})
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report.html", earlier)]


def test_a_page_that_cannot_be_written_is_refused_before_records_are_read(tmp_path):
    def records():
        raise AssertionError("read a record")
        yield

    for path, message in ((tmp_path / "no" / "report.html", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(ValueError, match=message):
            write_report(path, records(), {})


def test_a_file_that_is_not_a_report_is_not_replaced(tmp_path):
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    with pytest.raises(ValueError, match=r"mine\.html: exists, and is not an earlier report"):
        write_report(tmp_path / "mine.html", [], {})
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"
    write_report(tmp_path / "report.html", [], {}, "First")
    write_report(tmp_path / "report.html", [], {}, "Second")
    assert "Second" in (text := (tmp_path / "report.html").read_text()) and "First" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "report.html"]
